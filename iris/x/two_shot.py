"""Tiles of all ranks, added up in two steps: one rank reads all of a tile and stores the sum to the others.

How ranks signal that a tile is there, and has been read: `iris.x.locks`. Sums are rounded once.

Programs wait for their peers here. So all ranks call for the same tiles, and the programs that do so are resident at
once, or take their tiles in the same order.
"""

import triton

from iris.x.add_up import add_up
from iris.x.locks import PERIOD, SIGNAL, arrived, begin
from iris.x.tile import check, check_locks, columns_of, rows_of


@triton.jit
def all_reduce_two_shot(tile, src, dst, locks, ctx):
    """Add up a tile of all ranks on one of them, which stores the sum to all: the fewest bytes, two steps.

    ``src`` and ``locks`` as in `all_reduce_one_shot`; ``dst`` too, but on the heap of every rank. Tiles are added up by
    the ranks in turn. Over the link, on average over W tiles: (W - 1) / W tiles in for the sum, and as much out.
    """
    check("all_reduce_two_shot", ctx, tile, False, src=src, dst=dst)
    check_locks("all_reduce_two_shot", locks)
    number = src.number_of(tile)
    lock = locks + number
    start, good = begin(tile, src, lock, ctx)
    owner = number % ctx.num_ranks
    if good:
        if ctx.cur_rank != owner:
            ctx.signal(lock, SIGNAL, owner, op="add")
            arrived(lock, start + PERIOD, ctx)
        elif arrived(lock, start + SIGNAL * (ctx.num_ranks - 1), ctx):
            rows, columns = rows_of(tile), columns_of(tile)
            mask = (rows < src.M) & (columns < src.N)
            total = add_up(src.at(rows, columns), mask, src.ptr.dtype.element_ty, ctx).to(dst.ptr.dtype.element_ty)
            for distance in range(1, ctx.num_ranks + 1):
                ctx.store(dst.at(rows, columns), total, (owner + distance) % ctx.num_ranks, mask=mask)
            for distance in range(1, ctx.num_ranks):
                ctx.signal(lock, PERIOD, (owner + distance) % ctx.num_ranks, op="add")
            ctx.signal(lock, PERIOD - SIGNAL * (ctx.num_ranks - 1), owner, op="add")
