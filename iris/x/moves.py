"""Tiles that only move. Nothing here waits: who reads what a peer has stored meets it first, by a barrier or a flag."""

import triton
import triton.language as tl

from iris.x.tile import check, check_choice, columns_of, rows_of


@triton.jit
def all_gather(tile, dst, dim: tl.constexpr, ctx):
    """Store a tile of this rank's shard to its place in every rank's ``dst``.

    The shards lie one after the other along ``dim``: with 0, ``dst`` is ``[W * M, N]`` for shards of ``[M, N]``, with
    1 it is ``[M, W * N]``; on the heap of every rank. Over the link: the tile, once to each peer, in one step.
    """
    check("all_gather", ctx, tile, True, dst=dst)
    check_choice("dim", dim, 0, 1)
    if dim == 0:
        height = dst.M // ctx.num_ranks
        _store_shard(tile, dst, height=height, width=dst.N, first_row=ctx.cur_rank * height, first_column=0, ctx=ctx)
    else:
        width = dst.N // ctx.num_ranks
        # Accesses of 16 bytes take a width, and a first column, that the compiler can see to be multiples of 16.
        if width % 16 == 0:
            _store_shard(
                tile,
                dst,
                height=dst.M,
                width=width // 16 * 16,
                first_row=0,
                first_column=ctx.cur_rank * (width // 16 * 16),
                ctx=ctx,
            )
        else:
            _store_shard(tile, dst, height=dst.M, width=width, first_row=0, first_column=ctx.cur_rank * width, ctx=ctx)


@triton.jit
def _store_shard(tile, dst, height, width, first_row, first_column, ctx):
    """A tile of a shard ``[height, width]``, which begins there, into every rank's ``dst``."""
    rows, columns = rows_of(tile), columns_of(tile)
    mask = (rows < height) & (columns < width)
    to = dst.at(rows + first_row, columns + first_column)
    data = tile.data.to(dst.ptr.dtype.element_ty)
    # Each rank begins with its neighbour, so that none is hit by all at once.
    for distance in range(1, ctx.num_ranks + 1):
        ctx.store(to, data, (ctx.cur_rank + distance) % ctx.num_ranks, mask=mask)


@triton.jit
def all_to_all(tile, src, dst, N_per_rank, ctx):
    """Store the columns of a tile to the ranks that they are for: chunk r to chunk ``cur_rank`` of rank r's ``dst``.

    ``src`` and ``dst``: ``[M, N_per_rank * W]``, ``dst`` on the heap of every rank. A `Tile` brings its values; of a
    `TileView` they are loaded from ``src``. A tile may have columns for several ranks. Over the link: what is for
    peers, once, in one step.
    """
    check("all_to_all", ctx, tile, False, src=src, dst=dst)
    rows, columns = rows_of(tile), columns_of(tile)
    there = (rows < src.M) & (columns < src.N)
    if tile.HOLDS_DATA:
        data = tile.data
    else:
        data = tl.load(src.at(rows, columns), mask=there)
    first = tile.pid_n * tile.block_n // N_per_rank
    last = (tl.minimum(tile.pid_n * tile.block_n + tile.block_n, src.N) - 1) // N_per_rank
    for to in range(first, last + 1):
        mask = there & (columns >= to * N_per_rank) & (columns < (to + 1) * N_per_rank)
        at = dst.at(rows, columns + (ctx.cur_rank - to) * N_per_rank)
        ctx.store(at, data.to(dst.ptr.dtype.element_ty), to, mask=mask)


@triton.jit
def gather(tile, src, source_rank, ctx):
    """Load ``source_rank``'s values of a tile of ``src``; zeros past the edge.

    ``src``: ``[M, N]``, on the heap of every rank. Over the link: the tile, once, in one step, a round trip.
    """
    check("gather", ctx, tile, False, src=src)
    rows, columns = rows_of(tile), columns_of(tile)
    mask = (rows < src.M) & (columns < src.N)
    return ctx.load(src.at(rows, columns), source_rank, mask=mask, other=0.0)
