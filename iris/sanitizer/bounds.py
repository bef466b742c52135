"""Finds accesses outside of allocations, and to memory that was freed, when they happen.

An allocation has the size that was asked for, without what it was rounded up to. While the sanitizer records, a gap
follows each one (`iris.observer.GAP`), so that an access beyond its end is not one to the next.
"""

import gc
import os
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from iris.heap import symmetric
from iris.observer import GAP, READ
from iris.sanitizer import elements
from iris.sanitizer.events import PRIVATE, Spans

Diagnose = Callable[[str, str, int | None], None]
"""Notes a mistake: its kind, what it is in words, and the number of its place."""

# So many tensors of torch in which loops poll are remembered.
MOST_TENSORS = 64


class Bounds:
    """The allocations of this process' heaps. A heap is symmetric, so these are the offsets on all ranks."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[tuple[int, ...], Table]] = {}
        # Begin and end of tensors of torch that were found by `outside_of_tensors`.
        self._tensors: list[tuple[int, int]] = []

    def check(self, diagnose: Diagnose, spans: Spans, kind: int, place: int) -> None:
        """Report the first of these accesses that is outside of all allocations, if there is one."""
        name, rank = spans.space
        if name == PRIVATE:
            return
        verb = "reads" if kind == READ else "writes"
        heap = symmetric.heap_named(name)
        if heap is None:  # the library's own memory
            return
        outside = self._table(heap).first_outside(spans)
        if outside is not None:
            reason, offset = outside
            text = f"{verb} rank {rank}'s {self._table(heap).describe(offset)}"
            diagnose(reason, text, place)

    def outside_of_tensors(self, addresses: list[int]) -> list[int]:
        """Those of these addresses at which no tensor of torch has memory, or had at an earlier call."""
        unknown = [each for each in addresses if not _is_in(self._tensors, each)]
        if unknown:
            found = [t for t in _tensors() if any(t[0] <= each < t[1] for each in unknown)]
            self._tensors = [*self._tensors[-MOST_TENSORS:], *found]
        return [each for each in unknown if not _is_in(self._tensors, each)]

    def is_outside(self, spans: Spans) -> bool:
        """Whether these bytes of a heap are in no tensor."""
        heap = symmetric.heap_named(spans.space[0])
        return heap is not None and self._table(heap).first_outside(spans) is not None

    def learn(self, spans: Spans) -> None:
        """There is a new allocation. Remember it, so that it can be named after it was freed."""
        heap = symmetric.heap_named(spans.space[0])
        if heap is not None:
            self._table(heap)

    def _table(self, heap: symmetric.SymmetricHeap) -> "Table":
        version = heap.version()
        name = heap.mapping.name
        if name not in self._known or self._known[name][0] != version:
            former = self._known[name][1] if name in self._known else None
            self._known[name] = version, Table(heap.allocations(), former)
        return self._known[name][1]


class Table:
    """The allocations of a heap, and those that are gone. ``former``: the table before this one."""

    def __init__(self, allocations: Sequence[tuple], former: "Table | None") -> None:
        live = sorted((block.offset, block.offset + block.size, not freed, block.text) for block, freed in allocations)
        self.live: list[tuple[int, int, bool, str]] = live
        self.gone: list[tuple[int, int, bool, str]] = []
        if former is not None:
            offsets = {begin for begin, *_ in live}
            self.gone += [each for each in former.gone if each[0] not in offsets]
            self.gone += [(b, e, False, text) for b, e, _, text in former.live if b not in offsets]
        self._begins = np.array([each[0] for each in live], dtype=np.int64)
        self._ends = np.array([each[1] for each in live], dtype=np.int64)
        self._in_use = np.array([each[2] for each in live], dtype=bool)

    def first_outside(self, spans: Spans) -> tuple[str, int] | None:
        """The kind of the first wrong access, "bounds" or "freed", and the offset of its first wrong byte."""
        if not len(self._begins):
            return self._reason(int(spans.begins[0])), int(spans.begins[0])
        index = np.searchsorted(self._begins, spans.begins, side="right") - 1
        inside = (index >= 0) & (spans.begins < self._ends[index])
        whole = inside & (spans.ends <= self._ends[index])
        fine = whole & self._in_use[index]
        if fine.all():
            return None
        first = int(np.argmin(fine))
        if not inside[first]:
            return self._reason(int(spans.begins[first])), int(spans.begins[first])
        if not whole[first]:
            return "bounds", int(self._ends[index[first]])
        return "freed", int(spans.begins[first])

    def describe(self, offset: int) -> str:
        """What is at ``offset``, in words: the tensor that is or was there, or the ones before and after it."""
        former = self._former(offset)
        if former is not None:
            return f"{former}, which has been freed (offset {offset:#x})"
        index = int(np.searchsorted(self._begins, offset, side="right")) - 1
        near = []
        if index >= 0 and offset < self._ends[index] + GAP:
            begin, end, in_use, text = self.live[index]
            if offset < end:
                freed = "" if in_use else ", which has been freed"
                return f"{text}{freed}{elements.element(text, offset - begin)} (offset {offset:#x})"
            near.append((offset - end, f"{text}, {_distance(text, offset - end)}past its end"))
        if index + 1 < len(self.live) and offset >= self._begins[index + 1] - GAP:
            begin, _, _, text = self.live[index + 1]
            near.append((begin - offset, f"{text}, {_distance(text, begin - offset)}before it"))
        if not near:
            return f"heap at offset {offset:#x}, where no tensor is"
        return f"{' or '.join(text for _, text in sorted(near))} (offset {offset:#x})"

    def _reason(self, offset: int) -> str:
        return "bounds" if self._former(offset) is None else "freed"

    def _former(self, offset: int) -> str | None:
        return next((text for begin, end, _, text in self.gone if begin <= offset < end), None)


def _distance(tensor: str, distance: int) -> str:
    return f"{elements.number_of(tensor, distance)} " if distance else "just "


def _is_in(ranges: list[tuple[int, int]], address: int) -> bool:
    return any(begin <= address < end for begin, end in ranges)


def _tensors() -> Iterator[tuple[int, int]]:
    """Where the memory of each tensor of this process begins and ends. It takes long."""
    for each in gc.get_objects():
        if type(each) in (torch.Tensor, torch.nn.Parameter) and each.layout == torch.strided:
            storage = each.untyped_storage()
            if storage.device.type == "cpu":
                yield storage.data_ptr(), storage.data_ptr() + storage.nbytes()


_mapped_ranges: list[tuple[int, int]] = []


def is_mapped(address: int) -> bool:
    """Whether this process has memory at ``address``. A load from elsewhere would kill it."""
    if not _is_in(_mapped_ranges, address):
        _read_mapped_ranges()  # it may be new
    return _is_in(_mapped_ranges, address)


def _read_mapped_ranges() -> None:
    with open(f"/proc/{os.getpid()}/maps") as lines:
        ranges = (line.split()[0].split("-") for line in lines)
        _mapped_ranges[:] = [(int(begin, 16), int(end, 16)) for begin, end in ranges]
