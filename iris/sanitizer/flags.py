"""What a reader of a flag may count on: what came before it in every order of the flag's updates that ends its wait.

A flag may have been raised further than its wait asks for, and a count may be the sum of other updates than those that
it happens to be of. What came with those was there by luck, and another time it is not: a sender that waits for one
credit too few sees them all, if its receiver is fast, and who counts the chunks of several senders does not know whose.

1. Updates that are in an order, as those of one program: who looks counts on the first value that ends its wait, of
   those that it can still see (`Flag.first`). All values are kept, each by what it changes of the one before.
2. Others: who looks counts on an update if the wait could not have ended without it, and without those that come
   after it (`Flag.luck`). That is known once all updates have been seen, those included that came after the look this
   time. So it is found at the end, and if anybody has counted on luck the notes are gone through again (`Verdicts`).
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from iris.sanitizer import clocks
from iris.sanitizer.clocks import Released, Thread
from iris.sanitizer.events import Wait

Moment = tuple[int, int]
"""Of an operation on a flag: the slot and the tick of who did it, which are another's never (`clocks`)."""

# Values between two that are kept whole.
STRIDE = 32


class Verdicts:
    """What an earlier time through the notes has found: the looks that were lucky, and what they may count on."""

    def __init__(self) -> None:
        self.of: dict[Moment, frozenset[Moment]] = {}
        self.wanted: set[Moment] = set()

    def learn(self, found: dict[Moment, frozenset[Moment]]) -> bool:
        """Whether anything is new, after which the notes are to be gone through again."""
        new = any(self.of.get(look) != reliable for look, reliable in found.items())
        self.of |= found
        self.wanted.update(*found.values())
        return new


class _Look(NamedTuple):
    """``unknown``: those updates of before, by number, of which the thread did not know; ``count``: of all before."""

    moment: Moment
    wait: Wait
    value: int
    unknown: tuple[int, ...]
    count: int  # type: ignore[assignment]  # of the tuple, the method of the same name


class _Releases:
    """What was released with each value of a flag: a whole one every `STRIDE` values, and the changes between."""

    def __init__(self, first: Released | None) -> None:
        self._last = self._whole = first
        self._wholes: list[Released | None] = [first]
        self._changes: list[list[tuple]] = []

    def append(self, released: Released) -> None:
        if len(self._changes) % STRIDE == STRIDE - 1:
            self._wholes.append(released)
            self._changes.append([])
        else:
            self._changes.append(list(_changes(self._last, released)))
        self._last = released

    def __getitem__(self, index: int) -> Released | None:
        whole = index // STRIDE
        result = self._wholes[whole]
        for changes in self._changes[whole * STRIDE : index]:
            result = _changed(result, changes)
        return result


def _changes(old: Released | None, new: Released) -> Iterator[tuple]:
    for rank in (None, *new.to_rank):
        after = _clock_of(new, rank)
        before = np.zeros_like(after)
        known = _clock_of(old, rank)
        before[:, : known.shape[1]] = known
        where = np.flatnonzero(before != after).astype(np.int32)
        yield rank, after.shape, where, after.reshape(-1)[where]


def _changed(released: Released | None, changes: list[tuple]) -> Released:
    new = {}
    for rank, shape, where, values in changes:
        clock, before = np.zeros(shape, dtype=np.int32), _clock_of(released, rank)
        clock[:, : before.shape[1]] = before
        clock.reshape(-1)[where] = values
        new[rank] = clock
    return Released(new.pop(None), new)


def _clock_of(released: Released | None, rank: int | None) -> np.ndarray:
    if released is None:
        return clocks.empty()
    return released.to_all if rank is None else released.to_rank.get(rank, clocks.empty())


class Flag:
    """A word and its updates, from when one began to look: ``value`` was there, with what was ``released``.

    ``state``: what else shows that it is the same, the numbers of its release and of who wrote it as data.
    """

    def __init__(self, value: int, released: Released | None, state: tuple[int, int]) -> None:
        # Values are numbered: 0 is the first, 1 is what the first update has made of it.
        self._values = [value]
        self._added: list[int | None] = [0]
        self._moments: list[Moment] = [(-1, 0)]
        self._releases = _Releases(released)
        # What each knew who made an update, and did not learn from the flag in doing so.
        self._known: list[np.ndarray] = [np.zeros(0, dtype=np.int32)]
        self._looks: list[_Look] = []
        # Whether all updates are in an order; and whether each is known to add to the value, or to replace it.
        self.in_order, self._plain = True, True
        self._state = state

    def holds(self, value: int, state: tuple[int, int]) -> bool:
        """Whether the word has been written by `write` alone. A host's copies are not, and have no place among values:
        when one of them is looked at, later ones may have been gone through already."""
        return self._values[-1] == value and self._state == state

    def write(
        self,
        value: int,
        added: int | None,
        thread: Thread,
        known: np.ndarray,
        released: Released,
        state: tuple[int, int],
    ) -> None:
        """``added``: None of what takes the place of the value before. ``known``: to ``thread`` when it began."""
        self.in_order = self.in_order and (len(self._moments) == 1 or _knows(known, self._moments[-1]))
        self._values.append(value)
        self._added.append(added)
        self._moments.append((thread.slot, thread.tick))
        self._known.append(known.copy())
        self._releases.append(released)
        self._state = state

    def write_otherwise(self) -> None:
        """The next update is of another kind: in another order, it would do nobody knows what."""
        self._plain = False

    def look(self, wait: Wait | None, thread: Thread, known: np.ndarray) -> None:
        """``thread`` has seen the value of now, and goes on. Without a wait it may do so by just this value."""
        value = self._values[-1]
        wait = wait or Wait("eq", value, 64)
        if not wait.ends_at(value) or not self._plain:
            return
        number = len(self._moments)
        while self.in_order and number > 1 and not _knows(known, self._moments[number - 1]):
            number -= 1
        older = range(number, len(self._moments)) if self.in_order else range(1, len(self._moments))
        unknown = tuple(each for each in older if not _knows(known, self._moments[each]))
        if unknown:
            self._looks.append(_Look((thread.slot, thread.tick), wait, value, unknown, len(self._moments)))

    def first(self, wait: Wait, thread: Thread) -> Released | None:
        """What came with the first value that ends ``wait``, of those that ``thread`` can still see."""
        number = len(self._values) - 1
        while number > 0 and not _knows(thread.clock[clocks.AS_WRITTEN], self._moments[number]):
            number -= 1
        while not wait.ends_at(self._values[number]):
            number += 1
        return self._releases[number]

    def luck(self) -> Iterator[tuple[Moment, frozenset[Moment]]]:
        """Looks that have seen what they may not count on; and the updates, of those they saw, on which they may."""
        if self.in_order or not self._plain:
            return
        for look in self._looks:
            later = range(look.count, len(self._moments))
            others = np.array([*look.unknown, *(n for n in later if not _knows(self._known[n], look.moment))])
            before = self._value_without(look)
            reliable = [n for n in look.unknown if not self._ends_without(n, others, before, look.wait)]
            if len(reliable) < len(look.unknown):
                yield look.moment, frozenset(self._moments[n] for n in reliable)

    def _value_without(self, look: _Look) -> int:
        """What the flag held if there were none of the updates of which the look did not know."""
        added = [each for each in (self._added[n] for n in look.unknown) if each is not None]
        if len(added) == len(look.unknown):
            return look.value - sum(added)
        unknown = set(look.unknown)
        *_, value = self._values_of(self._values[0], (n for n in range(1, look.count) if n not in unknown))
        return value

    def _ends_without(self, number: int, others: np.ndarray, value: int, wait: Wait) -> bool:
        """Whether ``wait`` can end before the update of this number, and those that come after it."""
        moment = self._moments[number]
        left = (n for n in others.tolist() if n != number and not _knows(self._known[n], moment))
        return any(map(wait.ends_at, self._values_of(value, left)))

    def _values_of(self, value: int, numbers: Iterator[int]) -> Iterator[int]:
        yield value
        for number in numbers:
            added = self._added[number]
            value = self._values[number] if added is None else value + added
            yield value


def _knows(clock: np.ndarray, moment: Moment) -> bool:
    slot, tick = moment
    return slot < 0 or (slot < len(clock) and clock[slot] >= tick)
