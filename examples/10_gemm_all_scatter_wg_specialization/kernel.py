"""Work-group specialised: one kernel, in which some programs only multiply and the others only send.

A program that multiplies leaves each tile in this rank's own memory, and tells so by a flag. A program that sends waits
for the flags of its tiles, one after the other, and stores each tile to all peers. So products never wait for the link.
The first programs of the grid are those that multiply, and they wait for nobody; the others must be resident on all
ranks at a time, because they meet.

Over the link, each rank: its ``[M, N / W]`` columns of the product to every peer, in one step; and twice a flag from
every sender.

Memory, and what orders it. Every flag is the number of a call, so it only rises, and is right in a CUDA graph too:

* ``finished[tile]``: set by the program of this rank that multiplied the tile, after its stores of it, with release;
  awaited by the one of this rank that sends it, with acquire. In the next call it is set to the next number. The kernel
  of that call begins when this one is over, so nobody who waits for an old number is left.
* ``meetings``: the barriers of the senders, of which number p meets number p of every other rank. After the first one
  all ranks have reached this call, and are past what they did with the last one's result. After the second one number
  p of every peer has stored its tiles here, and so all tiles are here when all senders have ended.
* ``epochs[program]``: the number of the last call. Each program keeps it for itself.
"""

import triton
import triton.language as tl

from iris import DeviceContext, TraceEvent
from iris.language.ordering import store_after_sync  # a store, after every warp's load of the same word
from iris.ops.gemm import product, swizzle_tile
from iris.ops.kernel_arguments import Matrix, Tiling


@triton.jit
def _tile_offsets(tile, M, N, TILING: tl.constexpr):
    """The rows and columns of a tile."""
    BLOCK_M: tl.constexpr = TILING.BLOCK_M
    BLOCK_N: tl.constexpr = TILING.BLOCK_N
    pid_m, pid_n = swizzle_tile(tile, tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), 8)
    return pid_m * BLOCK_M + tl.arange(0, BLOCK_M), pid_n * BLOCK_N + tl.arange(0, BLOCK_N)


@triton.jit
def _multiply(ctx, finished, epoch, a, b, c, M, N, K, program, programs, TILING: tl.constexpr):
    """The part of one of ``programs`` that multiply."""
    for tile in range(program, tl.cdiv(M, TILING.BLOCK_M) * tl.cdiv(N, TILING.BLOCK_N), programs):
        rows, columns = _tile_offsets(tile, M, N, TILING)
        work = ctx.tracing.record_event_start(TraceEvent.compute, pid_m=tile)
        total = product(a, b, rows, columns, stop_m=M, N=N, K=K, TILING=TILING)
        ctx.tracing.record_event_end(work)
        at = rows.to(tl.int64)[:, None] * c.row_stride + columns.to(tl.int64)[None, :] * c.column_stride
        tl.store(c.ptr + at, total.to(c.ptr.dtype.element_ty), mask=(rows < M)[:, None] & (columns < N)[None, :])
        ctx.signal(finished + tile, epoch, ctx.cur_rank)


@triton.jit
def _send(ctx, finished, epoch, meetings, c, M, N, program, programs, TILING: tl.constexpr):
    """The part of one of ``programs`` that send. They take tiles in the order in which these are multiplied."""
    ctx.barrier(meetings)
    for tile in range(program, tl.cdiv(M, TILING.BLOCK_M) * tl.cdiv(N, TILING.BLOCK_N), programs):
        ctx.wait(finished + tile, epoch, cmp="reached")
        rows, columns = _tile_offsets(tile, M, N, TILING)
        at = rows.to(tl.int64)[:, None] * c.row_stride + columns.to(tl.int64)[None, :] * c.column_stride
        mask = (rows < M)[:, None] & (columns < N)[None, :]
        data = tl.load(c.ptr + at, mask=mask)
        for distance in range(1, ctx.num_ranks):
            ctx.store(c.ptr + at, data, (ctx.cur_rank + distance) % ctx.num_ranks, mask=mask)
    ctx.barrier(meetings)


@triton.jit
def gemm_all_scatter(
    context_tensor, finished, meetings, epochs, a, b, c, M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    W: tl.constexpr, SENDERS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``c = a b`` on every rank. ``c``: this rank's ``N`` columns of the result, the same place everywhere."""
    ctx = DeviceContext.initialize(context_tensor, num_ranks=W)
    program, multipliers = tl.program_id(0), tl.num_programs(0) - SENDERS
    epoch = tl.load(epochs + program) + 1
    tiling: tl.constexpr = Tiling(BLOCK_M, BLOCK_N, BLOCK_K)
    out = Matrix(c, stride_cm, stride_cn)
    if program < multipliers:
        _multiply(
            ctx,
            finished,
            epoch,
            a=Matrix(a, stride_am, stride_ak),
            b=Matrix(b, stride_bk, stride_bn),
            c=out,
            M=M,
            N=N,
            K=K,
            program=program,
            programs=multipliers,
            TILING=tiling,
        )
    else:
        _send(
            ctx,
            finished=finished,
            epoch=epoch,
            meetings=meetings,
            c=out,
            M=M,
            N=N,
            program=program - multipliers,
            programs=SENDERS,
            TILING=tiling,
        )
    store_after_sync(epochs + program, epoch)
