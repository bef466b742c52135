"""GEMM and one-shot all-reduce: every rank loads the parts of a tile from all ranks, and adds them up itself.

A program computes a tile, puts this rank's part where peers can read it, and signals the tile to all. When all ranks
have, it loads the W parts of the tile, adds them up in the order of ranks in float32, and stores the result: the same
bits on every rank. `iris.x.all_reduce_one_shot` does all of that; it keeps the flags, one a tile. While a program waits
or loads, others multiply.

Over the link, each rank: M N elements in from every peer, in one step after a signal a tile. The parts travel in the
type of the result.

What orders a call and the next one is in the flags too: a rank writes its part of a tile when all have read that of
the last call. So there is no barrier, neither before nor after. The flags only rise and are never reset.
"""

import triton
import triton.language as tl

import iris
from iris import DeviceContext, TraceEvent
from iris.ops.gemm import product, swizzle_tile
from iris.ops.kernel_arguments import Matrix, Tiling


@triton.jit
def gemm_all_reduce(
    context_tensor, a, b, c, part, flags, M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    W: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """``c``: the sum of all ranks' ``a b``. ``part``: ``[M, N]``, symmetric, where this rank's product lies."""
    ctx = DeviceContext.initialize(context_tensor, num_ranks=W)
    parts = iris.x.make_tensor_view(part, M, N, stride_m=N, stride_n=1)
    result = iris.x.make_tensor_view(c, M, N, stride_m=stride_cm, stride_n=stride_cn)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    # The same order on every rank: nobody waits for a tile that its peer computes after one that waits for it.
    for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        pid_m, pid_n = swizzle_tile(tile, tiles_m, tiles_n, GROUP_M)
        rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        work = ctx.tracing.record_event_start(TraceEvent.compute, pid_m=pid_m, pid_n=pid_n)
        left, right = Matrix(a, stride_am, stride_ak), Matrix(b, stride_bk, stride_bn)
        total = product(left, right, rows, columns, stop_m=M, N=N, K=K, TILING=Tiling(BLOCK_M, BLOCK_N, BLOCK_K))
        ctx.tracing.record_event_end(work)
        iris.x.all_reduce_one_shot(
            iris.x.Tile(pid_m, pid_n, BLOCK_M, BLOCK_N, data=total), parts, result, flags, ctx=ctx
        )
