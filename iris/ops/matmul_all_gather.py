"""out = the rows of every rank's A B, on every rank: each tile goes to all ranks when it is computed.

Over the link, each rank: its ``[M, N]`` of the result to every peer, W - 1 times M N elements out, in one step. At
most one tile a program is under way when the last product is done, so the sending is hidden but for that, unless the
link is slower than the products are.
"""

import triton
import triton.language as tl

from iris.language.context import DeviceContext
from iris.language.dependent_launch import gdc_wait
from iris.language.tracing import TraceEvent
from iris.ops.counts import await_done, await_ready, begin, end
from iris.ops.gemm import biased, product, remap_xcd, scaled, swizzle_tile
from iris.x import Tile, all_gather, make_tensor_view


@triton.jit
def matmul_all_gather(
    channel,
    out_context,
    a,
    b,
    epilogue,
    out,
    M,
    N,
    K,
    W: tl.constexpr,
    TILING: tl.constexpr,
):
    """``out``: ``[W * M, N]``, the same place on every rank, in the memory that ``out_context`` is of."""
    gdc_wait()
    ctx, counts = DeviceContext.initialize(channel.context, num_ranks=W), channel.counts
    places = DeviceContext.initialize(out_context, num_ranks=W)
    BLOCK_M: tl.constexpr = TILING.BLOCK_M
    BLOCK_N: tl.constexpr = TILING.BLOCK_N
    epoch = begin(ctx, counts)
    programs = tl.num_programs(0)
    first = remap_xcd(tl.program_id(0), programs, TILING.XCDS, TILING.CHUNK)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for number in range(first, tiles_m * tiles_n, programs):
        pid_m, pid_n = swizzle_tile(number, tiles_m, tiles_n, TILING.GROUP)
        rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        work = ctx.tracing.record_event_start(TraceEvent.compute, pid_m=pid_m, pid_n=pid_n)
        total = product(a, b, rows, columns, stop_m=M, N=N, K=K, TILING=TILING)
        ctx.tracing.record_event_end(work)
        total = scaled(total, epilogue, rows, columns, stop_m=M, N=N)
        total = biased(total, epilogue, columns, N)
        if number == first:
            await_ready(ctx, counts, epoch)
        tile = Tile(pid_m, pid_n, BLOCK_M, BLOCK_N, data=total)
        view = make_tensor_view(out.ptr, W * M, N, stride_m=out.row_stride, stride_n=out.column_stride)
        all_gather(tile, view, 0, places)
    await_done(ctx, counts, epoch)
    end(counts, epoch)
