"""Fused: one kernel, in which every program stores a tile to all ranks as soon as it has computed it.

Nothing waits. A store is a request that the program need not see answered, so while the link takes a tile, the program
that sent it loads and multiplies the next one. What nothing hides is the last tile of each program.

Over the link, each rank: its ``[M, N / W]`` columns of the product to every peer, in one step.
"""

import triton
import triton.language as tl

from iris import DeviceContext, TraceEvent
from iris.ops.gemm import product, swizzle_tile
from iris.ops.kernel_arguments import Matrix, Tiling


@triton.jit
def gemm_all_scatter(
    context_tensor, a, b, c, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    W: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``c = a b`` on every rank. ``c``: this rank's ``N`` columns of the result, the same place everywhere."""
    ctx = DeviceContext.initialize(context_tensor, num_ranks=W)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        pid_m, pid_n = swizzle_tile(tile, tiles_m, tiles_n, 8)
        rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        work = ctx.tracing.record_event_start(TraceEvent.compute, pid_m=pid_m, pid_n=pid_n)
        left, right = Matrix(a, stride_am, stride_ak), Matrix(b, stride_bk, stride_bn)
        total = product(left, right, rows, columns, stop_m=M, N=N, K=K, TILING=Tiling(BLOCK_M, BLOCK_N, BLOCK_K))
        ctx.tracing.record_event_end(work)
        data = total.to(c.dtype.element_ty)
        at = rows.to(tl.int64)[:, None] * stride_cm + columns.to(tl.int64)[None, :] * stride_cn
        mask = (rows < M)[:, None] & (columns < N)[None, :]
        # Ranks begin with different peers, so that no link is asked for by all; each ends with its own memory.
        for distance in range(1, W + 1):
            ctx.store(c + at, data, (ctx.cur_rank + distance) % W, mask=mask)
