"""Zeros for the rows that a dispatch has not written: what an expert has room for after its last row.

In memory of this rank alone. A program has every so many of the rows, and stores to those that no expert has got.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from triton import next_power_of_2

from iris.ccl.kernel_launch import INTEGERS
from iris.experts.kernel_arguments import Extents, FewTokens
from iris.language.dependent_launch import gdc_wait
from iris.runtime.launch import addresses, prepare

# Bytes of a row that a program stores at a time: eight vectors of 16 bytes for each of 128 threads.
BLOCK_BYTES = 16384
NUM_WARPS = 4


@triton.jit
def zero_padding(
    rows, counts, offsets, ROOM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EXTENTS: tl.constexpr
):
    """``rows``: ``[ROOM, WIDTH]``. ``counts`` and ``offsets``: of the dispatch's `Layout`."""
    gdc_wait()
    expert, column = tl.arange(0, EXTENTS.LOCALS), tl.arange(0, BLOCK)
    first = tl.load(offsets + expert, mask=expert < EXTENTS.LOCAL, other=0)
    last = first + tl.load(counts + expert, mask=expert < EXTENTS.LOCAL, other=0)
    zeros = tl.zeros((BLOCK,), dtype=rows.dtype.element_ty)
    for row in range(tl.program_id(0), ROOM, tl.num_programs(0)):
        written = tl.max(((row >= first) & (row < last)).to(tl.int32), axis=0)
        if written == 0:
            for begin in range(0, WIDTH, BLOCK):
                target = rows + tl.cast(row, tl.int64) * WIDTH + begin + column
                tl.store(target, zeros, mask=begin + column < WIDTH)


def arguments(rows: torch.Tensor, counts: torch.Tensor, offsets: torch.Tensor, extents: Extents | FewTokens) -> tuple:
    """For `Received.rows`, or its scales. Zero is zero in every type of so many bytes."""
    room, width = rows.shape[:-1].numel(), rows.shape[-1]
    words = rows.view(INTEGERS[rows.itemsize])
    return words, counts, offsets, room, width, min(next_power_of_2(width), BLOCK_BYTES // rows.itemsize), extents


def enqueue(
    launches: dict[tuple[int, ...], Callable[..., None]], programs: int, args: tuple, stream: int | None
) -> None:
    """On the stream with this handle. ``launches``: those that are ready for such `arguments`."""
    if () not in launches:
        launches[()] = prepare(zero_padding, (programs, 1, 1), *args, num_warps=NUM_WARPS)
    launches[()](stream, addresses(args))
