"""Whose memory an address is in.

What ranks share lies elsewhere in each process, so what is noted of it are offsets in one rank's part of a mapping.
Such a part is a space, and so is all other memory of a process, whose offsets are its addresses.
"""

import threading
import weakref

import numpy as np

from iris.heap import mapping
from iris.sanitizer.events import PRIVATE, Spans


class Spaces:
    """Those that ``rank``'s process has, which may map more at any time, also where something was that is gone."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        # Another thread may see a new mapping meanwhile.
        self._one_thread = threading.RLock()
        # Begin, end and space of each part of a mapping, for as long as that is there.
        self._parts: weakref.WeakKeyDictionary[mapping.Memory, list] = weakref.WeakKeyDictionary()
        # How many mappings had been made, and how many of them were there, when one looked.
        self._seen = -1, 0
        self._starts: np.ndarray = np.empty(0, dtype=np.int64)
        self._ends: np.ndarray = np.empty(0, dtype=np.int64)
        self._spaces: list[tuple[str, int]] = []

    def spans(self, pointers: np.ndarray, size: int) -> list[Spans]:
        """The bytes of elements of ``size``, by the spaces that they are in."""
        addresses = np.ravel(pointers).astype(np.int64)
        result = []
        with self._one_thread:
            index = self._space_of(addresses)
            # Nearly always all are in one.
            only = (index == index[:1]).all()
            for space in index[:1] if only else np.unique(index):
                there = addresses if only else addresses[index == space]
                origin = 0 if space < 0 else int(self._starts[space])
                name = (PRIVATE, self._rank) if space < 0 else self._spaces[space]
                result.append(Spans(name, *_merged(there - origin, size)))
        return result

    def private(self, pointers: np.ndarray) -> np.ndarray:
        """Those of these addresses that are in no mapping."""
        addresses = np.ravel(pointers).astype(np.int64)
        return addresses[self._space_of(addresses) < 0]

    def _space_of(self, addresses: np.ndarray) -> np.ndarray:
        with self._one_thread:
            if (mapping.count_made(), len(self._parts)) != self._seen:
                self._see_mappings()
            if not len(self._starts):
                return np.full(addresses.shape, -1)
            index = np.searchsorted(self._starts, addresses, side="right") - 1
            return np.where((index >= 0) & (addresses < self._ends[index]), index, -1)

    def _see_mappings(self) -> None:
        made = mapping.count_made()
        for each in mapping.mappings():
            # One that is closed stays where it was until its last tensor dies.
            if each.memory is not None and each.memory not in self._parts:
                self._parts[each.memory] = [
                    (base, base + each.size, (each.name, rank))
                    for rank, base in zip(each.ranks, each.bases, strict=True)
                ]
        # Before they are gone through, as one may go meanwhile.
        self._seen = made, len(self._parts)
        found = sorted(part for parts in self._parts.values() for part in parts)
        self._starts = np.array([start for start, _, _ in found], dtype=np.int64)
        self._ends = np.array([end for _, end, _ in found], dtype=np.int64)
        self._spaces = [space for _, _, space in found]


def _merged(addresses: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Where the bytes of elements at ``addresses`` begin and end, neighbours as one."""
    if len(addresses) == 1:
        return addresses, addresses + size
    steps = np.diff(addresses)
    if (steps <= 0).any():
        addresses = np.unique(addresses)
        steps = np.diff(addresses)
    cuts = np.flatnonzero(steps > size)
    return addresses[np.append(0, cuts + 1)], addresses[np.append(cuts, -1)] + size
