"""Tiles of all ranks, added up in one step: each rank reads what it needs of all of them.

How ranks signal that a tile is there, and has been read: `iris.x.locks`. Sums are rounded once.

Programs wait for their peers here. So all ranks call for the same tiles, and the programs that do so are resident at
once, or take their tiles in the same order.
"""

import triton
import triton.language as tl

from iris.x.add_up import add_up
from iris.x.locks import SIGNAL, arrived, begin, finish, signal_all
from iris.x.tile import check, check_locks, columns_of, rows_of


@triton.jit
def all_reduce_one_shot(tile, src, dst, locks, ctx):
    """Add up a tile of all ranks on each of them: few bytes, one step.

    ``src``: ``[M, N]``, on the heap of every rank. A `Tile` is stored there first, and may not be changed by others; of
    a `TileView` it is there, and may be changed on return. ``dst``: ``[M, N]``, anywhere, and not ``src``. On return
    the sum lies there, the same bits on all ranks. ``locks``: an array of ``src``'s own, zeros once, to which callers
    write nothing: the call itself signals the others that the tile is there. Over the link: W - 1 tiles in, in one step
    after a signal.
    """
    check("all_reduce_one_shot", ctx, tile, False, src=src, dst=dst)
    check_locks("all_reduce_one_shot", locks)
    lock = locks + src.number_of(tile)
    start, good = begin(tile, src, lock, ctx)
    if good:
        signal_all(lock, SIGNAL, ctx)
        if arrived(lock, start + SIGNAL * ctx.num_ranks, ctx):
            rows, columns = rows_of(tile), columns_of(tile)
            mask = (rows < src.M) & (columns < src.N)
            total = add_up(src.at(rows, columns), mask, src.ptr.dtype.element_ty, ctx)
            tl.store(dst.at(rows, columns), total.to(dst.ptr.dtype.element_ty), mask=mask)
            finish(tile, lock, start, ctx)


@triton.jit
def reduce_scatter(tile, src, dst, locks, ctx):
    """Add up the rows of a tile that are this rank's, of all ranks' tiles.

    ``src``: ``[M, N]``, and ``locks``, as in `all_reduce_one_shot`. Each rank has ceil(M / W) of these rows, one rank
    after the other; where W does not divide M the last ranks have fewer, or none. ``dst``: ``[ceil(M / W), N]``,
    anywhere; it gets this rank's rows, and what lies after them is left alone. All ranks call for all tiles, which may
    have rows of several ranks. Over the link: this rank's rows of W - 1 tiles in, in one step after a signal.
    """
    check("reduce_scatter", ctx, tile, False, src=src, dst=dst)
    check_locks("reduce_scatter", locks)
    lock = locks + src.number_of(tile)
    start, good = begin(tile, src, lock, ctx)
    if good:
        signal_all(lock, SIGNAL, ctx)
        if arrived(lock, start + SIGNAL * ctx.num_ranks, ctx):
            rows, columns = rows_of(tile), columns_of(tile)
            # By src, which has one shape on all ranks: a rank that has fewer rows may pass a dst of just these.
            shard = tl.cdiv(src.M, ctx.num_ranks)
            first = ctx.cur_rank * shard
            mine = (rows >= first) & (rows < first + tl.minimum(shard, dst.M))
            mask = mine & (rows < src.M) & (columns < src.N)
            total = add_up(src.at(rows, columns), mask, src.ptr.dtype.element_ty, ctx)
            tl.store(dst.at(rows - first, columns), total.to(dst.ptr.dtype.element_ty), mask=mask)
            finish(tile, lock, start, ctx)
