"""out = the sum of all ranks' A B: its rows shared among the ranks, or all of them on every rank.

Each rank computes the rows of its peers first, those of its neighbour before all, and stores them tile by tile to
whom they belong; its own rows come last, and what the peers sent is added to each tile as it is computed. So the
sending is hidden behind products, but for the last tiles of the peers' rows. For all rows on every rank each then
stores its sums to all.

Over the link, each rank: (W - 1) / W times M N elements out, in one step; for all rows twice that, in two.

The parts travel in the type of the result, as they do through the vendor's library, and are added up in float32: to a
rank's own product those of the ranks that follow it, one after the other.
"""

import triton
import triton.language as tl

from iris.language.context import DeviceContext
from iris.language.dependent_launch import gdc_wait
from iris.language.tracing import TraceEvent
from iris.ops.counts import ARRIVED, await_done, await_ready, begin, end
from iris.ops.gemm import biased, product, remap_xcd, scaled, swizzle_tile


# A number of rows may be 1, and is no constant then.
@triton.jit(do_not_specialize=["share"])
def matmul_reduce(
    channel,
    out_context,
    parts,
    a,
    b,
    epilogue,
    out,
    M,
    N,
    K,
    share,
    W: tl.constexpr,
    ALL_REDUCE: tl.constexpr,
    TILING: tl.constexpr,
):
    """``share``: rows that a rank adds up, M over W. ``parts``: ``[W, share, N]``, rank r's products in parts[r].

    ``out``: ``[share, N]``; with ``ALL_REDUCE`` ``[M, N]``, the same place on every rank, in ``out_context``'s memory.
    """
    gdc_wait()
    ctx, counts = DeviceContext.initialize(channel.context, num_ranks=W), channel.counts
    places = DeviceContext.initialize(out_context, num_ranks=W)
    rank = ctx.cur_rank
    BLOCK_M: tl.constexpr = TILING.BLOCK_M
    BLOCK_N: tl.constexpr = TILING.BLOCK_N
    epoch = begin(ctx, counts)
    programs = tl.num_programs(0)
    first = remap_xcd(tl.program_id(0), programs, TILING.XCDS, TILING.CHUNK)
    tiles_m, tiles_n = tl.cdiv(share, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n
    element: tl.constexpr = parts.dtype.element_ty
    # Whom the last tile went to, and its number: this rank, if to nobody.
    to, sent = rank, 0
    for number in range(first, W * tiles, programs):
        owner = (rank + 1 + number // tiles) % W
        tile = number % tiles
        pid_m, pid_n = swizzle_tile(tile, tiles_m, tiles_n, TILING.GROUP)
        local = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        mine = (local < share) & (owner * share + local < M)
        mask = mine[:, None] & (columns < N)[None, :]
        rows, stop = owner * share + local, tl.minimum((owner + 1) * share, M)
        work = ctx.tracing.record_event_start(TraceEvent.compute, pid_m=pid_m, pid_n=pid_n)
        total = product(a, b, rows, columns, stop_m=stop, N=N, K=K, TILING=TILING)
        ctx.tracing.record_event_end(work)
        if to != rank:
            # After the next product: by then the stores are there, and the release has little to wait for. And
            # before whatever this program waits for next, so that nobody waits in a circle.
            ctx.signal(counts + ARRIVED + sent, 1, to, op="add")
        total = scaled(total, epilogue, rows, columns, stop_m=stop, N=N)
        if number == first:
            await_ready(ctx, counts, epoch)
        at = local.to(tl.int64)[:, None] * N + columns[None, :]
        step = share.to(tl.int64) * N
        if owner != rank:
            ctx.store(parts + rank * step + at, total.to(element), owner, mask=mask)
        else:
            ctx.wait(counts + ARRIVED + tile, epoch * (W - 1), cmp="reached")
            for distance in tl.static_range(1, W):
                source = (rank + distance) % W
                total += tl.load(parts + source * step + at, mask=mask, other=0).to(tl.float32)
            total = biased(total, epilogue, columns, N)
            result = total.to(out.ptr.dtype.element_ty)
            at_n = columns.to(tl.int64)[None, :] * out.column_stride
            if ALL_REDUCE:
                there = out.ptr + ((rank * share + local).to(tl.int64)[:, None] * out.row_stride + at_n)
                for distance in range(1, W + 1):
                    places.store(there, result, (rank + distance) % W, mask=mask)
            else:
                tl.store(out.ptr + (local.to(tl.int64)[:, None] * out.row_stride + at_n), result, mask=mask)
        to, sent = owner, tile
    if to != rank:
        ctx.signal(counts + ARRIVED + sent, 1, to, op="add")
    if ALL_REDUCE:
        await_done(ctx, counts, epoch)
    end(counts, epoch)
