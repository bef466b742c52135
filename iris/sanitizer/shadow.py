"""Shadow memory: for each byte of all ranks, the last write, the accesses since, and what was released into it.

It holds numbers, whose meaning `races` keeps. Per byte there are three:

* the *writer*: the number of the access that wrote it last
* the *set*: the number of a set of accesses since then, which are reads and atomic operations. Equal sets have one
  number, and there are few.
* the *release*: the number of the clocks that were released into it

It is made in pieces, as memory is accessed.
"""

from collections.abc import Iterator

import numpy as np

from iris.sanitizer.events import Spans

# A piece has 2 to this power bytes.
PIECE_BITS = 24

NOBODY = 0
"""The writer of a byte that nobody has written since it was allocated."""


class Bytes:
    """The bytes of one piece that an access touches, and their numbers.

    ``index``: which bytes, within the piece. ``first``: the piece's offset.
    """

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
        """This is new memory, whatever was there before."""
        for values in (self._writers, self._sets, self._releases):
            if values[self._index].any():  # pages that were never written are to stay without memory
                values[self._index] = 0

    def releases(self) -> list[tuple[int, int]]:
        """Each release of these bytes, and how many of them have it."""
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
        """Replace each number that ``new`` has as a key by its value."""
        found = values[self._index]
        result = found.copy()
        for old, number in new.items():
            result[found == old] = number
        values[self._index] = result

    def _distinct(self, values: np.ndarray) -> list[tuple[int, int]]:
        """Each number, with the offset of a byte that has it."""
        low = int(values.min())
        if low == int(values.max()):
            return [(low, self._offset(0))]
        numbers, at = np.unique(values, return_index=True)
        return [(int(number), self._offset(int(i))) for number, i in zip(numbers, at, strict=True)]

    def _offset(self, i: int) -> int:
        within = self._index.start + i if isinstance(self._index, slice) else int(self._index[i])
        return self._first + within


class Shadow:
    """The shadow of all memory of all ranks."""

    def __init__(self) -> None:
        self._pieces: dict[tuple, tuple[np.ndarray, ...]] = {}

    def bytes(self, spans: Spans) -> Iterator[Bytes]:
        """The bytes of ``spans``, piece by piece."""
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
