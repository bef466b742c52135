"""Which bytes of a heap are in use: offsets in, offsets out.

Best fit, the lowest offset among equals, neighbours joined when they are freed. What comes out depends on nothing but
the calls made, in their order, so ranks that make the same calls hold the same offsets without a message between them.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

ALIGNMENT = 1024


@dataclass(frozen=True)
class HeapStats:
    """What is in use, in bytes.

    Attributes
    ----------
    allocated : int
        What was asked for and is in use.
    reserved : int
        The same with each block rounded up to whole multiples of 1024 bytes.
    peak : int
        The largest ``reserved`` so far.
    largest_free_block : int
        The largest request that fits.
    count : int
        Blocks in use.
    """

    allocated: int
    reserved: int
    peak: int
    largest_free_block: int
    count: int


def round_up(size: int) -> int:
    """``size`` in bytes, rounded up to a whole multiple of `ALIGNMENT`."""
    return (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


class Allocator:
    """Blocks of ``capacity`` bytes, which is rounded up to a whole multiple of `ALIGNMENT`."""

    def __init__(self, capacity: int) -> None:
        self.capacity = round_up(capacity)
        # A free block is known by its size (to choose one), by its start and by its end (to join neighbours).
        self._free = [(self.capacity, 0)]
        self._size_at = {0: self.capacity}
        self._start_of = {self.capacity: 0}
        self._asked: dict[int, int] = {}
        self._allocated = self._reserved = self._peak = 0

    def fits(self, size: int) -> bool:
        """Whether `allocate` would find room for ``size`` bytes."""
        return bool(self._free) and self._free[-1][0] >= _block_size(size)

    def allocate(self, size: int) -> int | None:
        """The offset of a block of ``size`` bytes, or None if there is no room. 0 bytes get a block of their own."""
        need = _block_size(size)
        index = bisect_left(self._free, (need, 0))
        if index == len(self._free):
            return None
        found, offset = self._free.pop(index)
        self._forget(offset, found)
        if found > need:
            self._add_free(offset + need, found - need)
        self._asked[offset] = size
        self._allocated += size
        self._reserved += need
        self._peak = max(self._peak, self._reserved)
        return offset

    def free(self, offset: int) -> None:
        """Take back the block at ``offset``; KeyError if none starts there (or no longer)."""
        size = self._asked.pop(offset)
        block = _block_size(size)
        self._allocated -= size
        self._reserved -= block
        start, end = offset, offset + block
        if end in self._size_at:
            end += self._remove_free(end)
        if start in self._start_of:
            start = self._start_of[start]
            self._remove_free(start)
        self._add_free(start, end - start)

    def stats(self) -> HeapStats:
        """What is in use now."""
        largest = self._free[-1][0] if self._free else 0
        return HeapStats(self._allocated, self._reserved, self._peak, largest, len(self._asked))

    def _add_free(self, offset: int, size: int) -> None:
        insort(self._free, (size, offset))
        self._size_at[offset] = size
        self._start_of[offset + size] = offset

    def _remove_free(self, offset: int) -> int:
        size = self._size_at[offset]
        del self._free[bisect_left(self._free, (size, offset))]
        self._forget(offset, size)
        return size

    def _forget(self, offset: int, size: int) -> None:
        del self._size_at[offset], self._start_of[offset + size]


def _block_size(size: int) -> int:
    return round_up(size) or ALIGNMENT
