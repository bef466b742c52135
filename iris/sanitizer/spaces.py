"""Turns addresses into spaces and offsets, which are the same on all ranks.

Memory that ranks share has other addresses in each process. So events name a byte by a *space* and an offset in it. One
rank's part of a shared mapping is a space. All other memory of a process is one more space, `PRIVATE`, whose offsets
are addresses.
"""

import threading
import weakref

import numpy as np

from iris.heap import mapping
from iris.sanitizer.events import PRIVATE, Spans


class Spaces:
    """The spaces of ``rank``'s process. It may map more at any time, also at addresses of mappings that are gone."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        # Another thread may look up addresses, and find a new mapping, at the same time.
        self._one_thread = threading.RLock()
        # Begin, end and space of the parts of each mapping, as long as it is there.
        self._parts: weakref.WeakKeyDictionary[mapping.Memory, list] = weakref.WeakKeyDictionary()
        # At the last look: how many mappings had ever been made, and how many were there.
        self._seen = -1, 0
        self._starts: np.ndarray = np.empty(0, dtype=np.int64)
        self._ends: np.ndarray = np.empty(0, dtype=np.int64)
        self._spaces: list[tuple[str, int]] = []

    def spans(self, pointers: np.ndarray, size: int) -> list[Spans]:
        """The bytes of elements of ``size`` bytes at ``pointers``, by space."""
        addresses = np.ravel(pointers).astype(np.int64)
        result = []
        with self._one_thread:
            index = self._space_of(addresses)
            # Nearly always all are in one space.
            only = (index == index[:1]).all()
            for space in index[:1] if only else np.unique(index):
                there = addresses if only else addresses[index == space]
                origin = 0 if space < 0 else int(self._starts[space])
                name = (PRIVATE, self._rank) if space < 0 else self._spaces[space]
                result.append(Spans(name, *_merged(there - origin, size)))
        return result

    def private(self, pointers: np.ndarray) -> np.ndarray:
        """Those of these addresses that are in no shared mapping."""
        addresses = np.ravel(pointers).astype(np.int64)
        return addresses[self._space_of(addresses) < 0]

    def _space_of(self, addresses: np.ndarray) -> np.ndarray:
        """For each address the index of its space in ``self._spaces``, or -1 if it is private."""
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
            # A mapping that is closed stays until its last tensor dies.
            if each.memory is not None and each.memory not in self._parts:
                self._parts[each.memory] = [
                    (base, base + each.size, (each.name, rank))
                    for rank, base in zip(each.ranks, each.bases, strict=True)
                ]
        # Counted before the loop over them: one may go meanwhile.
        self._seen = made, len(self._parts)
        found = sorted(part for parts in self._parts.values() for part in parts)
        self._starts = np.array([start for start, _, _ in found], dtype=np.int64)
        self._ends = np.array([end for _, end, _ in found], dtype=np.int64)
        self._spaces = [space for _, _, space in found]


def _merged(addresses: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Where elements of ``size`` bytes at ``addresses`` begin and end; contiguous ones are merged."""
    if len(addresses) == 1:
        return addresses, addresses + size
    steps = np.diff(addresses)
    if (steps <= 0).any():
        addresses = np.unique(addresses)
        steps = np.diff(addresses)
    cuts = np.flatnonzero(steps > size)
    return addresses[np.append(0, cuts + 1)], addresses[np.append(cuts, -1)] + size
