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
from iris.ops.gemm import product, remap_xcd, scaled, swizzle_tile
from iris.x import Tile, all_gather, make_tensor_view


@triton.jit
def matmul_all_gather(
    context_tensor,
    out_context,
    counts,
    a,
    b,
    bias,
    scale_a,
    scale_b,
    out,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_om,
    stride_on,
    W: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    XCDS: tl.constexpr,
    CHUNK: tl.constexpr,
    CACHE_A: tl.constexpr,
    CACHE_B: tl.constexpr,
    ALLOW_TF32: tl.constexpr,
    BIASED: tl.constexpr,
    SCALED: tl.constexpr,
):
    """``out``: ``[W * M, N]``, the same place on every rank, in the memory that ``out_context`` is of."""
    gdc_wait()
    ctx = DeviceContext.initialize(context_tensor, num_ranks=W)
    places = DeviceContext.initialize(out_context, num_ranks=W)
    epoch = begin(ctx, counts)
    programs = tl.num_programs(0)
    first = remap_xcd(tl.program_id(0), programs, XCDS, CHUNK)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for number in range(first, tiles_m * tiles_n, programs):
        pid_m, pid_n = swizzle_tile(number, tiles_m, tiles_n, GROUP)
        rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        work = ctx.tracing.record_event_start(TraceEvent.compute, pid_m=pid_m, pid_n=pid_n)
        total = product(
            a, b, rows, columns, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
            BLOCK_K, CACHE_A, CACHE_B, ALLOW_TF32,
        )  # fmt: skip
        ctx.tracing.record_event_end(work)
        total = scaled(total, scale_a, scale_b, rows, columns, M, N, SCALED)
        if BIASED:
            total += tl.load(bias + columns, mask=columns < N, other=0)[None, :].to(tl.float32)
        if number == first:
            await_ready(ctx, counts, epoch)
        tile = Tile(pid_m, pid_n, BLOCK_M, BLOCK_N, total)
        all_gather(tile, make_tensor_view(out, W * M, N, stride_om, stride_on), 0, places)
    await_done(ctx, counts, epoch)
    end(counts, epoch)
