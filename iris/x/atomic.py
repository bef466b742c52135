"""Tiles of all ranks, added up by atomic additions, in the order in which ranks come and in the type of the result."""

import triton

from iris.x.tile import check, columns_of, rows_of


@triton.jit
def all_reduce_atomic(tile, dst, ctx):
    """Add a tile to every rank's ``dst``, atomically, in the type of ``dst``.

    ``dst``: ``[M, N]``, on the heap of every rank, with what the sum begins with, zeros for example. It is complete
    after a barrier. Over the link: the tile, once to each peer, in one step.
    """
    check("all_reduce_atomic", ctx, tile, True, dst=dst)
    rows, columns = rows_of(tile), columns_of(tile)
    mask = (rows < dst.M) & (columns < dst.N)
    data = tile.data.to(dst.ptr.dtype.element_ty)
    for distance in range(1, ctx.num_ranks + 1):
        to = (ctx.cur_rank + distance) % ctx.num_ranks
        ctx.atomic_add(dst.at(rows, columns), data, to, mask=mask, sem="relaxed")
