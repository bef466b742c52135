"""Tiles of all ranks, added up by one rank at a time, in the order in which they get the lock."""

import triton
import triton.language as tl

from iris.ccl.combine import accumulator
from iris.language.ordering import lock as lock_of
from iris.language.ordering import unlock as unlock_of
from iris.x.locks import report
from iris.x.tile import check, check_locks, columns_of, rows_of


@triton.jit
def all_reduce_spinlock(tile, dst, locks, ctx):
    """Add a tile to every rank's ``dst``, one rank at a time, in float32 but rounded to the type of ``dst`` each time.

    ``dst`` as in `all_reduce_atomic`, and of any type. ``locks``: one a tile, 0 while free: an array of its own,
    whose locks do not count. Over the link: the tile, twice for each peer, in two steps and those of the lock.
    """
    check("all_reduce_spinlock", ctx, tile, True, dst=dst)
    check_locks("all_reduce_spinlock", locks)
    rows, columns = rows_of(tile), columns_of(tile)
    mask = (rows < dst.M) & (columns < dst.N)
    element: tl.constexpr = dst.ptr.dtype.element_ty
    ACC: tl.constexpr = accumulator(element)
    for distance in range(1, ctx.num_ranks + 1):
        to = (ctx.cur_rank + distance) % ctx.num_ranks
        lock = ctx.translate(locks + dst.number_of(tile), to)
        at = ctx.translate(dst.at(rows, columns), to)
        taken = lock_of(lock, ctx._record())
        if taken == 0:
            total = tl.load(at, mask=mask, other=0.0).to(ACC) + tile.data.to(ACC)
            tl.store(at, total.to(element), mask=mask)
            unlock_of(lock)
        else:
            report(locks + dst.number_of(tile), taken, to, ctx)
