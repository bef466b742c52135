"""Producer and consumer: two kernels on two streams at a time, of which one multiplies and the other sends.

The GEMM leaves each tile in this rank's own memory, and tells so by a flag. The other kernel waits for the flags of its
tiles, one after the other, and stores each tile to all peers. The GEMM is an ordinary one but for a line, and waits for
nobody. The kernel that sends has few programs, so while it waits the GEMM has multiprocessors left, whichever of the
two the GPU begins with; its programs must be resident on all ranks at a time, because they meet.

Over the link, each rank: its ``[M, N / W]`` columns of the product to every peer, in one step; and twice a flag from
every program that sends.

Memory, and what orders it. Every flag is the number of a call, so it only rises, and is right in a CUDA graph too:

* ``finished[tile]``: set by the program of the GEMM that multiplied the tile, after its stores of it, with release;
  awaited by the program on the same rank that sends it, with acquire. In the next call it is set to the next number.
  Both kernels of a call are over before the next call's begin, so nobody who waits for an old number is left.
* ``meetings``: the barriers of the programs that send, of which number p meets number p of every other rank. After the
  first one all ranks have reached this call, and are past what they did with the last one's result. After the second
  one number p of every peer has stored its tiles here, and so all tiles are here when the kernel has ended.
* ``epochs[program]``: the number of the last call, for each kernel. Each program keeps it for itself.
"""

import triton
import triton.language as tl

from iris import DeviceContext, TraceEvent
from iris.language.ordering import store_after_sync  # a store, after every warp's load of the same word
from iris.ops.gemm import product, swizzle_tile
from iris.ops.kernel_arguments import Matrix, Tiling


@triton.jit
def _tile_offsets(tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The rows and columns of a tile."""
    pid_m, pid_n = swizzle_tile(tile, tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), 8)
    return pid_m * BLOCK_M + tl.arange(0, BLOCK_M), pid_n * BLOCK_N + tl.arange(0, BLOCK_N)


@triton.jit
def gemm(
    context_tensor, finished, epochs, a, b, c, M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    W: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The producer: ``c = a b`` on this rank alone, tile by tile."""
    ctx = DeviceContext.initialize(context_tensor, num_ranks=W)
    epoch = tl.load(epochs + tl.program_id(0)) + 1
    for tile in range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N), tl.num_programs(0)):
        rows, columns = _tile_offsets(tile, M, N, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N)
        work = ctx.tracing.record_event_start(TraceEvent.compute, pid_m=tile)
        left, right = Matrix(a, stride_am, stride_ak), Matrix(b, stride_bk, stride_bn)
        total = product(left, right, rows, columns, stop_m=M, N=N, K=K, TILING=Tiling(BLOCK_M, BLOCK_N, BLOCK_K))
        ctx.tracing.record_event_end(work)
        at = rows.to(tl.int64)[:, None] * stride_cm + columns.to(tl.int64)[None, :] * stride_cn
        tl.store(c + at, total.to(c.dtype.element_ty), mask=(rows < M)[:, None] & (columns < N)[None, :])
        ctx.signal(finished + tile, epoch, ctx.cur_rank)
    store_after_sync(epochs + tl.program_id(0), epoch)


@triton.jit
def all_scatter(
    context_tensor, finished, meetings, epochs, c, M, N, stride_cm, stride_cn,
    W: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The consumer: ``c`` to the same place on every peer, tile by tile, in the order in which they are multiplied."""
    ctx = DeviceContext.initialize(context_tensor, num_ranks=W)
    epoch = tl.load(epochs + tl.program_id(0)) + 1
    ctx.barrier(meetings)
    for tile in range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N), tl.num_programs(0)):
        ctx.wait(finished + tile, epoch, cmp="reached")
        rows, columns = _tile_offsets(tile, M, N, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N)
        at = rows.to(tl.int64)[:, None] * stride_cm + columns.to(tl.int64)[None, :] * stride_cn
        mask = (rows < M)[:, None] & (columns < N)[None, :]
        data = tl.load(c + at, mask=mask)
        for distance in range(1, W):
            ctx.store(c + at, data, (ctx.cur_rank + distance) % W, mask=mask)
    ctx.barrier(meetings)
    store_after_sync(epochs + tl.program_id(0), epoch)
