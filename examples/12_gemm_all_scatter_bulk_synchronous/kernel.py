"""Bulk-synchronous: two kernels, and the second begins when the first has ended.

The first is a GEMM and knows nothing of other ranks. The second sends the whole product to all peers and computes
nothing. What the link does is not hidden at all: the time is the sum of both. It is what a library call after another
does, and what the patterns of the other examples are measured against.

Over the link, each rank: its ``[M, N / W]`` columns of the product to every peer, in one step.
"""

import triton
import triton.language as tl

from iris import DeviceContext, TraceEvent
from iris.ops.gemm import product, swizzle_tile
from iris.ops.kernel_arguments import Matrix, Tiling


@triton.jit
def gemm(
    context_tensor, a, b, c, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``c = a b``; a program computes one tile after the other. The context is for traces alone."""
    ctx = DeviceContext.initialize(context_tensor)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        pid_m, pid_n = swizzle_tile(tile, tiles_m, tiles_n, 8)
        rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        work = ctx.tracing.record_event_start(TraceEvent.compute, pid_m=pid_m, pid_n=pid_n)
        left, right = Matrix(a, stride_am, stride_ak), Matrix(b, stride_bk, stride_bn)
        total = product(left, right, rows, columns, stop_m=M, N=N, K=K, TILING=Tiling(BLOCK_M, BLOCK_N, BLOCK_K))
        ctx.tracing.record_event_end(work)
        mask = (rows < M)[:, None] & (columns < N)[None, :]
        at = rows.to(tl.int64)[:, None] * stride_cm + columns.to(tl.int64)[None, :] * stride_cn
        tl.store(c + at, total.to(c.dtype.element_ty), mask=mask)


@triton.jit
def all_scatter(
    context_tensor, c, M, N, stride_cm, stride_cn, W: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """``c``, this rank's ``N`` columns, to the same place on every peer, beginning with the right neighbour."""
    ctx = DeviceContext.initialize(context_tensor, num_ranks=W)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * tiles_n, tl.num_programs(0)):
        rows = tile // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = tile % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = (rows < M)[:, None] & (columns < N)[None, :]
        at = rows.to(tl.int64)[:, None] * stride_cm + columns.to(tl.int64)[None, :] * stride_cn
        data = tl.load(c + at, mask=mask)
        for distance in range(1, W):
            ctx.store(c + at, data, (ctx.cur_rank + distance) % W, mask=mask)
