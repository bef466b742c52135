"""Of each byte: who wrote it last, who has read it since, and what has been released into it.

Accesses have numbers. A byte holds the number of the last write; the number of a *set* of accesses since, reads and
what is atomic; and the number of what was released. Sets are kept once each, and there are few. Memory appears in
pieces as it is touched.
"""

from collections.abc import Iterator

import numpy as np

from iris.sanitizer.events import Spans

PIECE_BITS = 24

NOBODY = 0
"""In the place of a writer: none that was seen since the memory was allocated."""


class Bytes:
    """A part of one piece that an access touches: its offsets, and what is noted of each."""

    def __init__(
        self, writers: np.ndarray, sets: np.ndarray, releases: np.ndarray, index: "slice | np.ndarray", first: int
    ) -> None:
        self._writers, self._sets, self._releases = writers, sets, releases
        self._index, self._first = index, first

    def writers(self) -> list[tuple[int, int]]:
        """Each writer of these bytes, with the offset of a byte that it wrote."""
        return self._distinct(self._writers[self._index])

    def sets(self) -> list[tuple[int, int]]:
        """Each set of these bytes, with the offset of a byte that has it."""
        return self._distinct(self._sets[self._index])

    def write(self, writer: int) -> None:
        self._writers[self._index] = writer
        if self._sets[self._index].any():
            self._sets[self._index] = 0

    def forget(self) -> None:
        """This is new memory, whatever was there before. Pages that nobody has touched stay so."""
        for values in (self._writers, self._sets, self._releases):
            if values[self._index].any():
                values[self._index] = 0

    def releases(self) -> list[tuple[int, int]]:
        """The number of each release into these bytes, and how many of them hold it."""
        values = self._releases[self._index]
        low = int(values.min())
        if low == int(values.max()):
            return [(low, values.size)]
        numbers, counts = np.unique(values, return_counts=True)
        return [(int(number), int(count)) for number, count in zip(numbers, counts, strict=True)]

    def replace_sets(self, new: dict[int, int]) -> None:
        self._replace(self._sets, new)

    def replace_releases(self, new: dict[int, int]) -> None:
        self._replace(self._releases, new)

    def _replace(self, values: np.ndarray, new: dict[int, int]) -> None:
        """Each number of these bytes that ``new`` has by another."""
        found = values[self._index]
        result = found.copy()
        for old, number in new.items():
            result[found == old] = number
        values[self._index] = result

    def _distinct(self, values: np.ndarray) -> list[tuple[int, int]]:
        low = int(values.min())
        if low == int(values.max()):
            return [(low, self._offset(0))]
        numbers, at = np.unique(values, return_index=True)
        return [(int(number), self._offset(int(i))) for number, i in zip(numbers, at, strict=True)]

    def _offset(self, i: int) -> int:
        within = self._index.start + i if isinstance(self._index, slice) else int(self._index[i])
        return self._first + within


class Shadow:
    """All memory of all ranks."""

    def __init__(self) -> None:
        self._pieces: dict[tuple, tuple[np.ndarray, ...]] = {}

    def bytes(self, spans: Spans) -> Iterator[Bytes]:
        begins, ends = spans.begins, spans.ends
        low, high = int(begins[0]) >> PIECE_BITS, int(ends[-1] - 1) >> PIECE_BITS
        if low == high:
            yield self._part(spans.space, low, begins, ends)
            return
        for number in range(low, high + 1):
            first, last = number << PIECE_BITS, (number + 1) << PIECE_BITS
            here = (begins < last) & (ends > first)
            if here.any():
                yield self._part(spans.space, number, np.maximum(begins[here], first), np.minimum(ends[here], last))

    def _part(self, space: tuple, number: int, begins: np.ndarray, ends: np.ndarray) -> Bytes:
        key = (space, number)
        if key not in self._pieces:
            # Pages of zeros take no memory before they are written.
            self._pieces[key] = tuple(np.zeros(1 << PIECE_BITS, dtype=np.int32) for _ in range(3))
        first = number << PIECE_BITS
        if len(begins) == 1:
            index: slice | np.ndarray = slice(int(begins[0]) - first, int(ends[0]) - first)
        else:
            sizes = ends - begins
            starts = np.repeat(begins - first - np.append(0, np.cumsum(sizes)[:-1]), sizes)
            index = starts + np.arange(int(sizes.sum()))
        writers, sets, releases = self._pieces[key]
        return Bytes(writers, sets, releases, index, first)
