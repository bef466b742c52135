"""What a wait for a flag guarantees: the updates of the flag that it acquires in every run, not in this one alone.

A wait may end at a value beyond the one that it asks for. And a counter may reach its value by other updates than those
that it consists of in this run. What was released with such updates was acquired by *luck*. Two examples: a sender that
waits for one credit too few sees all of them, if its receiver is fast; and a counter of the chunks of several senders
does not say whose chunks have come. The analysis must ignore such edges.

Reads of a flag are called *looks* here. There are two cases:

1. The updates are ordered, as those of one program are. A look acquires what was released with the first value that
   ends its wait, of those that it may still find (`Flag.first`). So all values of a flag are kept. To save memory, of
   most only the change of the clocks is.
2. They are not. A look is sure of an update if its wait could not have ended without that one and those that come
   after it (`Flag.lucky_looks`). That is known only when all updates are, those included that come after the look in
   this run. So lucky looks are found at the end. If there are any, the event logs are analysed once more, with the
   `Guarantees` of these looks.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from iris.sanitizer import clocks
from iris.sanitizer.clocks import Epoch, Released, Thread
from iris.sanitizer.events import Wait

# How many values lie between two of which the clocks are kept in full.
STRIDE = 32


class Guarantees:
    """What earlier passes over the event logs have found about looks. Looks and updates are named by their epochs.

    Attributes
    ----------
    of_looks : dict
        For each lucky look, the updates that it is sure of.
    updates : set
        All of these updates. What each released by itself is needed in the next pass.
    """

    def __init__(self) -> None:
        self.of_looks: dict[Epoch, frozenset[Epoch]] = {}
        self.updates: set[Epoch] = set()

    def add(self, found: dict[Epoch, frozenset[Epoch]]) -> bool:
        """Returns whether anything is new, so that another pass is needed."""
        new = any(self.of_looks.get(look) != sure for look, sure in found.items())
        self.of_looks |= found
        self.updates.update(*found.values())
        return new


class _Look(NamedTuple):
    """A read of a flag that found ``value``.

    ``unordered``: the numbers of those updates before it that the reader did not come after until it looked.
    ``next_update``: the number of the first update after it.
    """

    epoch: Epoch
    wait: Wait
    value: int
    unordered: tuple[int, ...]
    next_update: int


class _Releases:
    """What was released with each value of a flag: in full every `STRIDE` values, and as changes between."""

    def __init__(self, first: Released | None) -> None:
        self._last = first
        self._in_full: list[Released | None] = [first]
        self._changes: list[list[tuple]] = []

    def append(self, released: Released) -> None:
        if len(self._changes) % STRIDE == STRIDE - 1:
            self._in_full.append(released)
            self._changes.append([])
        else:
            self._changes.append(list(_changes(self._last, released)))
        self._last = released

    def __getitem__(self, index: int) -> Released | None:
        group = index // STRIDE
        result = self._in_full[group]
        for changes in self._changes[group * STRIDE : index]:
            result = _changed(result, changes)
        return result


def _changes(old: Released | None, new: Released) -> Iterator[tuple]:
    """By rank, None for the clock of all: the new shape, the flat indices that differ, and the new values there."""
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
    """A word and its updates. Its history begins with ``value``, and with what was ``released`` into it.

    ``state``: the shadow memory's numbers of the word's release and last plain write. If they are others than after the
    last update, something else has written the word.
    """

    def __init__(self, value: int, released: Released | None, state: tuple[int, int]) -> None:
        # Value 0 is the first one, value n is what update n has made of it.
        self._values = [value]
        self._added: list[int | None] = [0]
        self._epochs: list[Epoch] = [(-1, 0)]
        self._releases = _Releases(released)
        # By update, its thread's clock before it: without what the update itself has acquired from the flag.
        self._clocks: list[np.ndarray] = [np.zeros(0, dtype=np.int32)]
        self._looks: list[_Look] = []
        # Whether each update comes after the one before; and whether each is known to add to the value or replace it.
        self.in_order, self._plain = True, True
        self._state = state

    def holds(self, value: int, state: tuple[int, int]) -> bool:
        """Whether nothing but `write` has written the word. Copies by the host are not noted here, as they have no
        place among the values: when a program looks at one, the analysis may have passed later ones already.
        """
        return self._values[-1] == value and self._state == state

    def write(
        self,
        value: int,
        added: int | None,
        thread: Thread,
        clock: np.ndarray,
        released: Released,
        state: tuple[int, int],
    ) -> None:
        """``thread`` has updated the word to ``value``.

        ``added``: the difference, or None if the new value does not depend on the old one. ``clock``: that of the
        thread before the update.
        """
        self.in_order = self.in_order and (len(self._epochs) == 1 or _is_after(clock, self._epochs[-1]))
        self._values.append(value)
        self._added.append(added)
        self._epochs.append((thread.slot, thread.tick))
        self._clocks.append(clock.copy())
        self._releases.append(released)
        self._state = state

    def write_otherwise(self) -> None:
        """The next update is neither an addition nor an exchange: its effect in another order is not known."""
        self._plain = False

    def look(self, wait: Wait | None, thread: Thread, clock: np.ndarray) -> None:
        """``thread``, whose clock this is, has found the latest value and goes on.

        Without a ``wait`` the program uses the value, and may rely on this very one.
        """
        value = self._values[-1]
        wait = wait or Wait("eq", value, 64)
        if not wait.ends_at(value) or not self._plain:
            return
        first = len(self._epochs)
        while self.in_order and first > 1 and not _is_after(clock, self._epochs[first - 1]):
            first -= 1
        older = range(first, len(self._epochs)) if self.in_order else range(1, len(self._epochs))
        unordered = tuple(each for each in older if not _is_after(clock, self._epochs[each]))
        if unordered:
            self._looks.append(_Look((thread.slot, thread.tick), wait, value, unordered, len(self._epochs)))

    def first(self, wait: Wait, thread: Thread) -> Released | None:
        """What was released with the first value that ends ``wait``, of those that ``thread`` may still find."""
        number = len(self._values) - 1
        while number > 0 and not _is_after(thread.clock[clocks.AS_WRITTEN], self._epochs[number]):
            number -= 1
        while not wait.ends_at(self._values[number]):
            number += 1
        return self._releases[number]

    def lucky_looks(self) -> Iterator[tuple[Epoch, frozenset[Epoch]]]:
        """The looks that have acquired more than they are sure of; with the updates that they are sure of."""
        if self.in_order or not self._plain:
            return
        for look in self._looks:
            later = range(look.next_update, len(self._epochs))
            others = np.array([*look.unordered, *(n for n in later if not _is_after(self._clocks[n], look.epoch))])
            before = self._value_without(look)
            sure = [n for n in look.unordered if not self._ends_without(n, others, before, look.wait)]
            if len(sure) < len(look.unordered):
                yield look.epoch, frozenset(self._epochs[n] for n in sure)

    def _value_without(self, look: _Look) -> int:
        """What the flag would have held without the updates that are unordered with the look."""
        added = [each for each in (self._added[n] for n in look.unordered) if each is not None]
        if len(added) == len(look.unordered):
            return look.value - sum(added)
        unordered = set(look.unordered)
        *_, value = self._values_of(self._values[0], (n for n in range(1, look.next_update) if n not in unordered))
        return value

    def _ends_without(self, number: int, others: np.ndarray, value: int, wait: Wait) -> bool:
        """Whether ``wait`` can end by ``others`` alone, without the update of this number and those after it.

        ``value``: what the flag holds before all of them.
        """
        epoch = self._epochs[number]
        left = (n for n in others.tolist() if n != number and not _is_after(self._clocks[n], epoch))
        return any(map(wait.ends_at, self._values_of(value, left)))

    def _values_of(self, value: int, numbers: Iterator[int]) -> Iterator[int]:
        """What the flag holds, from ``value`` on, after each of the updates of these numbers."""
        yield value
        for number in numbers:
            added = self._added[number]
            value = self._values[number] if added is None else value + added
            yield value


def _is_after(clock: np.ndarray, epoch: Epoch) -> bool:
    """Whether ``epoch`` happens before whoever has this row of a clock."""
    slot, tick = epoch
    return slot < 0 or (slot < len(clock) and clock[slot] >= tick)
