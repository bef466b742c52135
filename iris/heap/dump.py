"""What a heap holds, in words, for whoever looks at a program that hangs or computes the wrong thing.

From any thread, and whatever kernels do: what the host knows is copied before it is read, and memory as
`iris.heap.mapping.Mapping.snapshot` copies it.
"""

from typing import Protocol

import numpy as np
import torch

from iris.errors import readable
from iris.heap.allocator import HeapStats
from iris.heap.mapping import Mapping
from iris.heap.reclamation import Block
from iris.world import Group

# Elements that are all shown; and of how many distinct values it is said how often they occur.
MOST_ELEMENTS, MOST_VALUES = 32, 8
# Bytes of a tensor that is looked at.
LARGEST = 1 << 20


class _Heap(Protocol):
    """What is shown of an `iris.heap.symmetric.SymmetricHeap`."""

    group: Group
    size: int
    device: torch.device
    mapping: Mapping

    @property
    def mapped_size(self) -> int: ...
    def stats(self) -> HeapStats: ...
    def allocations(self) -> list[tuple[Block, bool]]: ...


def dump(heap: _Heap) -> str:
    """A heap of one rank: how full it is, and each tensor in use by offset, with what small ones of integers hold."""
    group, stats = heap.group, heap.stats()
    lines = [
        f"Heap of rank {group.ranks[group.rank]} of {group.size}, {readable(heap.size)} on {heap.device}: "
        f"{stats.count} tensor{'s' * (stats.count != 1)}, {readable(stats.allocated)} allocated, "
        f"{readable(stats.reserved)} reserved, {readable(heap.mapped_size - stats.reserved)} free "
        f"(the largest block {readable(stats.largest_free_block)})"
    ]
    for block, is_dead in sorted(heap.allocations(), key=lambda each: each[0].offset):
        waits = ", freed here: it comes back when all ranks have freed it and met" if is_dead else ""
        lines.append(f"  at {block.offset:#x}: {block.origin}, {readable(block.size)}{waits}")
        name = str(block.dtype).removeprefix("torch.")
        if not name.startswith(("int", "uint")) or not block.size:
            continue
        if block.size > LARGEST:
            lines.append(f"      more than {readable(LARGEST)}, and so not read")
        else:
            values = heap.mapping.snapshot(block.offset, block.size).view(name).reshape(block.shape)
            lines.append(f"      {contents(values)}")
    return "\n".join(lines)


def contents(values: np.ndarray) -> str:
    """Integers: all of a few; of more how often each occurs, or the range that they are in."""
    if values.size <= MOST_ELEMENTS:
        return str(values.tolist())
    distinct, often = np.unique(values, return_counts=True)
    if len(distinct) <= MOST_VALUES:
        return ", ".join(f"{times} times {value}" for value, times in zip(distinct, often, strict=True))
    return f"{len(distinct)} distinct values from {distinct[0]} to {distinct[-1]}"
