"""Rows of groups as fp8, with a float32 factor for each 128 columns: what a grouped GEMM of fp8 takes as A.

Each element is read once, and its byte written; rows of no group are neither read nor written. Tiles of a few rows and
up to 1024 columns are found as those of grouped GEMMs are (`iris.ops.grouped.groups`), so a launch has as many
programs as the GPU has multiprocessors, several times, whatever the groups are.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from iris.experts.rows import quantize_blocks
from iris.language.dependent_launch import gdc_wait
from iris.ops.grouped.groups import group_of, rows_of
from iris.ops.grouped.kernel_arguments import SCALE_BLOCK, GroupedRows, groups_up_to
from iris.ops.grouped.launch import multiprocessors
from iris.ops.kernel import SIMULATED_PROGRAMS
from iris.runtime.launch import enqueue

# Elements of a tile: 16 bytes of bf16 for each of 256 threads, four times.
TILE, MOST_COLUMNS, MOST_ROWS = 8192, 1024, 16
NUM_WARPS = 8
# Programs a multiprocessor: memory is the limit, and each program waits for its loads before it stores.
PROGRAMS = 4


class Quantisation(NamedTuple):
    """A constant of the kernel."""

    GROUPS: int
    """As `GroupedForm.GROUPS`."""
    ROWS: int
    COLUMNS: int
    """Of a tile, powers of two; columns are whole blocks."""
    GROUP: int
    """Columns of a block."""
    LARGEST: float
    """The largest number of the type that rows are rounded to."""


# A number of rows or groups may be 1, and is no constant then.
@triton.jit(do_not_specialize=["room", "E"])
def quantise_rows(x, groups, narrow, scales, room, E, N, FORM: tl.constexpr):
    """``x``, ``narrow``: ``[room, N]``, contiguous. ``scales``: float32 ``[room, ceil(N / 128)]``. ``groups``: a
    `GroupedRows`, of ``E`` groups that lie in one matrix."""
    gdc_wait()
    ROWS: tl.constexpr = FORM.ROWS
    COLUMNS: tl.constexpr = FORM.COLUMNS
    BLOCKS: tl.constexpr = COLUMNS // FORM.GROUP
    tiles_n = tl.cdiv(N, COLUMNS)
    _, counts = rows_of(groups, tl.arange(0, FORM.GROUPS), E, room)
    ends = tl.cumsum(tl.cdiv(counts, ROWS) * tiles_n, axis=0)
    for number in range(tl.program_id(0), tl.max(ends, axis=0), tl.num_programs(0)):
        group, before = group_of(number, ends)
        first, count = rows_of(groups, group, E, room)
        in_group = (number - before) // tiles_n * ROWS + tl.arange(0, ROWS)
        rows, inside = (first + in_group).to(tl.int64)[:, None], (in_group < count)[:, None]
        begin = (number - before) % tiles_n * COLUMNS
        columns = begin + tl.arange(0, COLUMNS)[None, :]
        mask = inside & (columns < N)
        data = tl.load(x + rows * N + columns, mask=mask, other=0).to(tl.float32)
        values, factors = quantize_blocks(data, narrow.dtype.element_ty, FORM)
        tl.store(narrow + rows * N + columns, values, mask=mask)
        number_of_block = begin // FORM.GROUP + tl.arange(0, BLOCKS)[None, :]
        deep = tl.cdiv(N, FORM.GROUP)
        tl.store(scales + rows * deep + number_of_block, factors, mask=inside & (number_of_block < deep))


def arguments_of(
    x: torch.Tensor, narrow: torch.Tensor, scales: torch.Tensor, offs: torch.Tensor, counts: torch.Tensor
) -> tuple:
    """Of the kernel."""
    (room, columns), E = x.shape, len(counts)
    wide = max(SCALE_BLOCK, min(MOST_COLUMNS, 1 << (columns - 1).bit_length()))
    largest = torch.finfo(narrow.dtype).max
    form = Quantisation(groups_up_to(E), min(MOST_ROWS, TILE // wide), wide, SCALE_BLOCK, largest)
    return x, GroupedRows(offs, counts), narrow, scales, room, E, columns, form


def quantise(
    x: torch.Tensor,
    narrow: torch.Tensor,
    scales: torch.Tensor,
    *,
    offs: torch.Tensor,
    counts: torch.Tensor,
    only_prepare: bool = False,
) -> None:
    """``narrow * scales`` is ``x``, of the rows of all groups: on the current stream.

    ``x``, ``narrow``: ``[rows, N]``, ``scales``: float32 ``[rows, ceil(N / 128)]``, all contiguous; ``offs`` and
    ``counts`` as `iris.ops.grouped_mm` takes them. ``only_prepare``: compile and load, and do nothing.
    """
    device = x.device.index
    programs = SIMULATED_PROGRAMS if device is None else PROGRAMS * multiprocessors(device)
    given = arguments_of(x, narrow, scales, offs, counts)
    enqueue(quantise_rows, (programs, 1, 1), device, *given, only_prepare=only_prepare, num_warps=NUM_WARPS)
