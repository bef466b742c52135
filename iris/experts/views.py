"""A slot's memory in one layout: as kernels take it, and as programs see it. Made once, since each view of a tensor
costs the host a microsecond or two."""

from typing import Any, NamedTuple

import torch

from iris import simulator
from iris.experts.kernel_arguments import Extents, FewTokens, Layout, LowLatencySlot, Scales, Slot
from iris.experts.memory import Memory
from iris.experts.statistics import Statistics
from iris.runtime.launch import addresses

# The place of a layout's rows among its fields.
ROWS = Layout._fields.index("rows")


class Format(NamedTuple):
    """What the rows of a dispatch are in memory. ``moved_as``: by kernels. ``scales``: factors of a row."""

    layout: str
    moved_as: torch.dtype
    received_as: torch.dtype
    scales: int = 0


class Views(NamedTuple):
    """``tensors``: as kernels are compiled for them. ``launched``: with an address in the place of each; in the
    simulator the same. The rest: as `Received` has it."""

    tensors: tuple[Slot | LowLatencySlot, Layout, Scales | None, Statistics | None]
    launched: tuple[Any, Any, Any, Any]
    rows: torch.Tensor
    counts: torch.Tensor
    offsets: torch.Tensor
    scales: torch.Tensor | None


# What is made in inference mode could not be used by autograd outside it.
@torch.inference_mode(False)
@torch.no_grad()
def views_of(memory: Memory, number: int, format: Format, extents: Extents | FewTokens) -> Views:
    """Of the slot with this number. They live no longer than the memory."""
    slot, layout, scales = memory.slots[number], memory.layouts[number][format.layout], None
    if format.scales:
        slot, layout, scales = memory.narrow(number, format.layout, format.moved_as, format.scales)
    shape = shape_of_rows(extents, format.layout, len(layout.rows))
    rows = layout.rows.view(format.received_as).view(shape)
    factors = None if scales is None else scales.placed.view(*shape[:-1], format.scales)
    tensors = (slot, layout, scales, memory.statistics)
    return Views(tensors, addresses(tensors), rows, layout.counts, layout.offsets, factors)


def with_rows(views: Views, rows: torch.Tensor) -> Views:
    """The same, where rows ``[rows, H]`` go to other memory."""
    slot, layout, scales, statistics = views.tensors
    tensors = (slot, layout._replace(rows=rows), scales, statistics)
    launched = addresses(tensors) if simulator.ACTIVE else _with_address(views.launched, rows.data_ptr())
    return views._replace(tensors=tensors, launched=launched)


def _with_address(launched: tuple, rows: int) -> tuple:
    """`Views.launched` on a GPU, with another address of the rows: one of dozens, which are not looked up anew."""
    slot, layout, *others = launched
    return (slot, (*layout[:ROWS], rows, *layout[ROWS + 1 :]), *others)


def shape_of_rows(extents: Extents | FewTokens, layout: str, room: int) -> tuple[int, ...]:
    """Of `Received.rows`, in a layout with room for so many."""
    if layout == "expanded":
        return extents.LOCAL, extents.W * extents.M, extents.H
    return room, extents.H
