"""GEMM and all-reduce by atomics: every tile is added to the sums of all ranks as soon as it is computed.

A program multiplies its tiles one after the other. Each product goes out by atomic additions in float32 to every rank's
sums, while the next one is computed: so the link is hidden behind products, but for the last tiles. Then the program
goes through its tiles again, waits until the parts of all ranks have arrived, and rounds the sums to the result.

Over the link, each rank: 4 M N bytes and a count for each tile to every peer, in one step. The bytes are twice those of
bf16 parts, which could not be added without rounding each time.

Memory, and what orders it:

* ``sums``, ``[2, M, N]``: call e adds to ``sums[e % 2]``, and clears the other, each rank its own. What it clears was
  read in call e - 1, which is over. Nobody adds there before call e + 1, and that begins with a barrier of all ranks,
  which this one enters when call e is over: so no addition can be lost.
* ``arrived[tile]``: every rank adds 1 to every rank's count after its additions to the tile. The program that rounds
  the tile waits for W in every call, all calls together. Counts only rise, so nothing is reset.
* ``epochs[program]``: calls so far. Each program keeps it for itself, in memory, which is right in a CUDA graph too.
"""

import triton
import triton.language as tl

import iris
from iris import DeviceContext, TraceEvent
from iris.language.ordering import store_after_sync  # a store, after every warp's load of the same word
from iris.ops.gemm import product, swizzle_tile
from iris.ops.kernel_arguments import Matrix, Tiling


@triton.jit
def gemm_all_reduce(
    context_tensor, a, b, c, sums, arrived, epochs, M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    W: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """``c``: the sum of all ranks' ``a b``."""
    ctx = DeviceContext.initialize(context_tensor, num_ranks=W)
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = tl.load(epochs + program) + 1
    step = (epoch & 1).to(tl.int64) * M * N
    now = iris.x.make_tensor_view(sums + step, M, N, stride_m=N, stride_n=1)
    later = iris.x.make_tensor_view(sums + (tl.cast(M, tl.int64) * N - step), M, N, stride_m=N, stride_n=1)
    result = iris.x.make_tensor_view(c, M, N, stride_m=stride_cm, stride_n=stride_cn)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)

    for tile in range(program, tiles_m * tiles_n, programs):
        pid_m, pid_n = swizzle_tile(tile, tiles_m, tiles_n, GROUP_M)
        rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        work = ctx.tracing.record_event_start(TraceEvent.compute, pid_m=pid_m, pid_n=pid_n)
        left, right = Matrix(a, stride_am, stride_ak), Matrix(b, stride_bk, stride_bn)
        total = product(left, right, rows, columns, stop_m=M, N=N, K=K, TILING=Tiling(BLOCK_M, BLOCK_N, BLOCK_K))
        ctx.tracing.record_event_end(work)
        iris.x.all_reduce_atomic(iris.x.Tile(pid_m, pid_n, BLOCK_M, BLOCK_N, data=total), now, ctx)
        for distance in range(1, W + 1):
            ctx.signal(arrived + tile, 1, (ctx.cur_rank + distance) % W, op="add")

    for tile in range(program, tiles_m * tiles_n, programs):
        ctx.wait(arrived + tile, epoch * W, cmp="reached")
        pid_m, pid_n = swizzle_tile(tile, tiles_m, tiles_n, GROUP_M)
        rows = (pid_m * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
        columns = (pid_n * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
        mask = (rows < M) & (columns < N)
        total = tl.load(now.at(rows, columns), mask=mask)
        tl.store(result.at(rows, columns), total.to(c.dtype.element_ty), mask=mask)
        tl.store(later.at(rows, columns), tl.zeros_like(total), mask=mask)
    store_after_sync(epochs + program, epoch)
