"""By which flag a program has come to know of another: what the report of a race names, if that was not enough.

Each time that a look at a word brings a program more of others, by the most generous of the `clocks`, one notes which
word that was, and who had written it last.
"""

from collections import defaultdict, deque

import numpy as np

from iris.sanitizer import clocks
from iris.sanitizer.accesses import Access, Carrier
from iris.sanitizer.clocks import Thread

# Looks that are remembered of each program: of a race, the second access comes soon after the look that is at fault.
REMEMBERED = 64

# So many words one after the other lie between two programs, at most, where one looks for the one that is at fault.
LONGEST_CHAIN = 32


class Carriers:
    """The words by which programs have come to know of others, by the slots of the programs' clocks."""

    def __init__(self) -> None:
        # The words by which each has come to know more, in turn, with what it knew then.
        self._acquired: dict[int, deque[tuple[np.ndarray, Carrier]]] = defaultdict(lambda: deque(maxlen=REMEMBERED))

    def acquired(self, thread: Thread, before: np.ndarray, carrier: Carrier) -> None:
        """By ``carrier`` the clocks of ``thread`` have become what they are; they were ``before``."""
        now, then = thread.clock[clocks.BOTH].copy(), before[clocks.BOTH]
        # Ticks only grow.
        if now.sum() != then.sum():
            self._acquired[thread.slot].append((now, carrier))

    def between(self, thread: Thread, access: Access) -> Carrier | None:
        """The word by which ``thread`` knows of ``access``, but not as the program is written."""
        found = self._first(thread.slot, access)
        for _ in range(LONGEST_CHAIN):
            if found is None or any(writer.thread_slot == access.thread_slot for writer in found.writers):
                break
            # A word that is in order: what is not, is how its writer knows.
            earlier = [
                carrier
                for writer in found.writers
                if thread.knows(writer.thread_slot, writer.tick)[clocks.AS_WRITTEN]
                and (carrier := self._first(writer.thread_slot, access)) is not None
            ]
            if not earlier:
                break
            found = earlier[0]
        return found

    def _first(self, slot: int, access: Access) -> Carrier | None:
        """Of the words by which who has this slot came to know, the one that carried ``access``."""
        acquired = self._acquired.get(slot, ())
        for number, (known, carrier) in enumerate(acquired):
            if len(known) > access.thread_slot and known[access.thread_slot] >= access.tick:
                # An older one may have carried it that is forgotten.
                return carrier if number or len(acquired) < REMEMBERED else None
        return None
