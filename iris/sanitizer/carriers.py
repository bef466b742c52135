"""By which flag a thread has come after another one: what the report of a race names as the flag that is at fault.

A *carrier* is a word whose read has added something to the reader's clock, by the most generous row of the `clocks`.
If two accesses race, and would not by a row that assumes more synchronisation, the carrier between them is the flag
that lacks a release, an acquire or a wider scope.
"""

from collections import defaultdict, deque

import numpy as np

from iris.sanitizer import clocks
from iris.sanitizer.accesses import Access, Carrier
from iris.sanitizer.clocks import Thread

# Carriers that are remembered of each thread. The second access of a race comes soon after the read that is at fault.
REMEMBERED = 64

# How many flags, at most, are followed from one thread to the next in search of the one that is at fault.
LONGEST_CHAIN = 32


class Carriers:
    """The latest carriers of each thread, by its slot in the clocks."""

    def __init__(self) -> None:
        # In order; each with the thread's row of the clock after it.
        self._acquired: dict[int, deque[tuple[np.ndarray, Carrier]]] = defaultdict(lambda: deque(maxlen=REMEMBERED))

    def acquired(self, thread: Thread, before: np.ndarray, carrier: Carrier) -> None:
        """``thread`` has read the word of ``carrier``; its clocks were ``before``."""
        row_now, row_before = thread.clock[clocks.RELEASE_AND_ACQUIRE].copy(), before[clocks.RELEASE_AND_ACQUIRE]
        # Ticks only grow, so equal sums mean equal clocks.
        if row_now.sum() != row_before.sum():
            self._acquired[thread.slot].append((row_now, carrier))

    def between(self, thread: Thread, access: Access) -> Carrier | None:
        """The flag by which ``thread`` would come after ``access`` if it had all that it lacks."""
        found = self._first(thread.slot, access)
        for _ in range(LONGEST_CHAIN):
            if found is None or any(writer.thread_slot == access.thread_slot for writer in found.writers):
                break
            # If this flag is in order, the one is at fault by which its writer came after the access.
            earlier = [
                carrier
                for writer in found.writers
                if thread.is_after(writer.thread_slot, writer.tick)[clocks.AS_WRITTEN]
                and (carrier := self._first(writer.thread_slot, access)) is not None
            ]
            if not earlier:
                break
            found = earlier[0]
        return found

    def _first(self, slot: int, access: Access) -> Carrier | None:
        """The first carrier by which the thread of this slot came after ``access``."""
        acquired = self._acquired.get(slot, ())
        for number, (known, carrier) in enumerate(acquired):
            if len(known) > access.thread_slot and known[access.thread_slot] >= access.tick:
                # The oldest that is remembered tells nothing: an earlier one may have done it.
                return carrier if number or len(acquired) < REMEMBERED else None
        return None
