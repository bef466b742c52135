"""out = the sum of all ranks' A B: its rows shared among the ranks, or all of them on every rank.

Compiled for gfx942 and gfx950 and run in the simulator; never run on an AMD GPU.

Each rank computes the rows of its peers first, those of its right neighbour before all, and stores them tile by tile to
whom they belong; its own rows come last, and what the peers sent is added to each tile as it is computed. For all rows
on every rank each then stores its sums to all.

Over the link, each rank: (W - 1) / W times M N elements out, in one step; for all rows twice that, in two. Parts travel
in the type of the result, as they do through the vendor's library, and are added up in float32, in the order of ranks.

A tile is announced after the *next* product: by then its stores are done, and the release, before which every
wavefront waits for its own, waits for nothing. Nobody waits in a circle: between a program's stores and their
announcement comes a product, but no wait for a peer.

Tiles of 256 x 128 are the largest that leave enough registers for the sums.
"""

from triton.experimental.gluon import language as gl

from iris.language.context import DeviceContext
from iris.language.jit import gluon_jit
from iris.language.tracing import TraceEvent
from iris.ops.cdna3.product import fetch_both, product
from iris.ops.cdna3.strips import STRIP, columns_of, everywhere, rows_from, strips
from iris.ops.counts import ARRIVED, await_done, await_ready, begin, end
from iris.ops.gemm import remap_xcd, swizzle_tile
from iris.ops.kernel_arguments import TilePlace


@gluon_jit
def tile_of(number, rank, M, share, tiles_m, tiles_n, W: gl.constexpr, TILING: gl.constexpr):
    """Whose rows the tile is of, its number among theirs; its first row and column, and where the owner's rows end.

    After the last tile there is none: the last will do, which nobody uses.
    """
    tiles = tiles_m * tiles_n
    number = gl.minimum(number, W * tiles - 1)
    owner = (rank + 1 + number // tiles) % W
    pid_m, pid_n = swizzle_tile(number % tiles, tiles_m, tiles_n, TILING.GROUP)
    stop = gl.minimum((owner + 1) * share, M)
    return owner, number % tiles, owner * share + pid_m * TILING.BLOCK_M, pid_n * TILING.BLOCK_N, stop


@gluon_jit
def add_parts(parts, own, rank, W: gl.constexpr, step, at, mask):
    """The sum of all ranks' parts of a strip, in float32. This rank's, ``own``, is in no memory."""
    total = gl.zeros_like(own).to(gl.float32)
    for source in gl.static_range(W):
        # No branch, so that the loads of all parts are under way at once.
        part = gl.load(parts + source * step + at, mask=mask & (source != rank), other=0)
        total += gl.where(source == rank, own, part).to(gl.float32)
    return total


@gluon_jit
def cdna3_matmul_reduce(
    channel,
    out_context,
    parts,
    a,
    b,
    bias,
    out,
    M,
    N,
    K,
    share,
    W: gl.constexpr,
    ALL_REDUCE: gl.constexpr,
    TILING: gl.constexpr,
):
    """``share``: rows that a rank adds up, M over W. ``parts``: ``[W, share, N]``, rank r's products in parts[r].

    ``out``: ``[share, N]``; with ``ALL_REDUCE`` ``[M, N]``, the same place on every rank, in ``out_context``'s memory.
    """
    ctx, counts = DeviceContext.initialize(channel.context, num_ranks=W), channel.counts
    out_ctx = DeviceContext.initialize(out_context, num_ranks=W)
    rank = ctx.cur_rank
    BLOCK_M: gl.constexpr = TILING.BLOCK_M
    BLOCK_N: gl.constexpr = TILING.BLOCK_N
    epoch = begin(ctx, counts)
    programs = gl.num_programs(0)
    first = remap_xcd(gl.program_id(0), programs, TILING.XCDS, TILING.CHUNK)
    tiles_m, tiles_n = gl.cdiv(share, BLOCK_M), gl.cdiv(N, BLOCK_N)
    _, _, row, column, stop = tile_of(first, rank, M, share, tiles_m=tiles_m, tiles_n=tiles_n, W=W, TILING=TILING)
    x, y = fetch_both(a, b, TilePlace(row, column, stop), 0, N=N, K=K, TILING=TILING)
    step = gl.cast(share, gl.int64) * N
    # Whom the last tile went to, and its number: this rank, if to nobody.
    to, sent = rank, 0
    for number in range(first, W * tiles_m * tiles_n, programs):
        owner, tile, row, column, stop = tile_of(
            number, rank, M, share, tiles_m=tiles_m, tiles_n=tiles_n, W=W, TILING=TILING
        )
        _, _, next_row, next_column, next_stop = tile_of(
            number + programs, rank, M, share, tiles_m=tiles_m, tiles_n=tiles_n, W=W, TILING=TILING
        )
        work = ctx.tracing.record_event_start(TraceEvent.compute, pid_m=row // BLOCK_M, pid_n=column // BLOCK_N)
        place, following = TilePlace(row, column, stop), TilePlace(next_row, next_column, next_stop)
        total, x, y = product(x, y, a, b, place=place, next_a=a.ptr, following=following, N=N, K=K, TILING=TILING)
        ctx.tracing.record_event_end(work)
        if to != rank:
            ctx.signal(counts + ARRIVED + sent, 1, to, op="add")
        if number == first:
            await_ready(ctx, counts, epoch)
        values = strips(total.to(parts.dtype.element_ty))
        rows = rows_from(row, BLOCK_M)
        inside = (rows < stop)[:, None]
        # Rows of a part, and of a result that is this rank's share, are counted from the owner's first.
        local = (rows - owner * share).to(gl.int64)[:, None]
        if owner != rank:
            there = ctx.translate(parts + rank * step, owner)
            for strip in gl.static_range(BLOCK_N // STRIP):
                columns = columns_of(column, strip)
                # Not even the arguments of an event are computed where nothing is traced: these would be, and early.
                if ctx.tracing.enabled:
                    at, mask = local * N + columns[None, :], inside & (columns < N)[None, :]
                    event = ctx.tracing.begin_move("store", parts + at, owner, mask)
                gl.store(there + (local * N + columns[None, :]), values[strip], mask=inside & (columns < N)[None, :])
                if ctx.tracing.enabled:
                    ctx.tracing.record_event_end(event)
        else:
            ctx.wait(counts + ARRIVED + tile, epoch * (W - 1), cmp="reached")
            if ALL_REDUCE:
                places = everywhere(out_ctx, out.ptr + gl.cast(rank, gl.int64) * share * out.row_stride)
            for strip in gl.static_range(BLOCK_N // STRIP):
                columns = columns_of(column, strip)
                mask = inside & (columns < N)[None, :]
                result = add_parts(
                    parts, values[strip], rank=rank, W=W, step=step, at=local * N + columns[None, :], mask=mask
                )
                if bias is not None:
                    result += gl.load(bias + columns, mask=columns < N, other=0).to(gl.float32)[None, :]
                at = local * out.row_stride + columns.to(gl.int64)[None, :] * out.column_stride
                if ALL_REDUCE:
                    for peer in gl.static_range(W):
                        event = out_ctx.tracing.begin_move("store", out.ptr + at, peer, mask)
                        gl.store(places[peer] + at, result.to(out.ptr.dtype.element_ty), mask=mask)
                        out_ctx.tracing.record_event_end(event)
                else:
                    gl.store(out.ptr + at, result.to(out.ptr.dtype.element_ty), mask=mask)
        to, sent = owner, tile
    if to != rank:
        ctx.signal(counts + ARRIVED + sent, 1, to, op="add")
    if ALL_REDUCE:
        await_done(ctx, counts, epoch)
    end(counts, epoch)
