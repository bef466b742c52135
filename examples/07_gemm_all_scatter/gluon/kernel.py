"""Fused, with roles inside each program: some warps fetch, some multiply, and some store to all ranks. For Hopper.

A program computes one tile after the other, of 128 x 256 say, and its warps are in four partitions:

* the **loader**, one warp, fetches blocks of A and B by TMA into a ring of stages in shared memory;
* two **multipliers**, four warps each, multiply the upper and the lower half of the tile's rows (wgmma), and leave the
  rounded products in shared memory;
* the **writer**, two warps, takes them from there and stores them to all ranks.

So while the writer stores a tile, the multipliers are at the next one, and the loader is ahead of both. All partitions
walk the same tiles in the same order, and meet in mbarriers alone. Nothing waits for another program, or for a peer.

Over the link, each rank: its ``[M, N / W]`` columns of the product to every peer, in one step.

The mbarriers hand shared memory on (PTX ISA, "mbarrier"). Each one's phases alternate, from 0 on; a wait for phase 1 of
a new one returns at once, which is how the ring and the products are free at first.

* ``smem_full[s]``: the bytes of stage s are there. Completed by TMA, awaited by both multipliers.
* ``smem_empty[s]``: both multipliers have read stage s. A product reads until the group has waited for it, and only
  then does the group arrive. Awaited by the loader, which then has the stage filled again.
* ``epilogue_full``: both halves of the tile's products are in shared memory: the group's stores come before its
  barrier, and that before the arrival. Awaited by the writer.
* ``epilogue_empty``: the writer has the products in registers: its loads come before its barrier, and that before the
  arrival. Awaited by both multipliers, before they leave the next tile's.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from iris import TraceEvent
from iris.gluon import IrisDeviceCtx
from iris.language.fences import block_barrier
from iris.ops.gemm import swizzle_tile
from iris.ops.hopper.pipeline import fetch

# Of the second multiplier, the writer and the loader: warps, and registers a thread. Four warps have one number of
# registers, which the last two share. The first multiplier is the program's own four warps, and has what is left.
WARPS = gl.constexpr([4, 2, 1])
REGISTERS = gl.constexpr([184, 136, 136])
# Rows that the writer has in registers at a time: 64 elements a thread.
STRIP = gl.constexpr(16)


@gluon.constexpr_function
def _lines(columns):
    """The writer's layout: 16 bytes a thread, side by side along a row, so that stores are of whole lines."""
    across = min(32, columns // 8)
    return gl.BlockedLayout([1, 8], [32 // across, across], [2, 1], [1, 0])


@gluon.jit
def _tile_offsets(turn, M, N, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """The first row and column of this program's tile number ``turn``."""
    tile = gl.program_id(0) + turn * gl.num_programs(0)
    pid_m, pid_n = swizzle_tile(tile, gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N), 8)
    return pid_m * BLOCK_M, pid_n * BLOCK_N


@gluon.jit
def _load(a, b, tiles_a, tiles_b, smem_full, smem_empty, M, N, K, turns):
    """The loader. Halves of A's blocks lie apart, one for each multiplier. What is past an edge comes as zeros."""
    STAGES: gl.constexpr = tiles_b.shape[0]
    HALF: gl.constexpr = a.block_type.shape[0]
    BLOCK_K: gl.constexpr = b.block_type.shape[0]
    BLOCK_N: gl.constexpr = b.block_type.shape[1]
    step = 0
    for turn in range(turns):
        row, column = _tile_offsets(turn, M, N, BLOCK_M=2 * HALF, BLOCK_N=BLOCK_N)
        for k in range(0, K, BLOCK_K):
            stage = step % STAGES
            mbarrier.wait(smem_empty.index(stage), step // STAGES & 1 ^ 1)
            there = smem_full.index(stage)
            mbarrier.expect(there, 2 * a.block_type.nbytes + b.block_type.nbytes)
            fetch(a, [row, k], there, tiles_a.index(2 * stage))
            fetch(a, [row + HALF, k], there, tiles_a.index(2 * stage + 1))
            fetch(b, [k, column], there, tiles_b.index(stage))
            step += 1


@gluon.jit
def _multiply(
    tracing,
    tiles_a,
    tiles_b,
    products,
    smem_full,
    smem_empty,
    epilogue_full,
    epilogue_empty,
    K,
    turns,
    WHICH: gl.constexpr,
):
    """A multiplier: the upper half of each tile (``WHICH`` 0) or the lower one (1)."""
    STAGES: gl.constexpr = tiles_b.shape[0]
    BLOCK_K: gl.constexpr = tiles_b.shape[1]
    HALF: gl.constexpr = products.shape[1]
    BLOCK_N: gl.constexpr = products.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    step = 0
    for turn in range(turns):
        work = tracing.record_event_start(TraceEvent.compute, pid_m=WHICH, pid_n=turn)
        total = gl.zeros([HALF, BLOCK_N], gl.float32, layout)
        for k in range(0, K, BLOCK_K):
            stage = step % STAGES
            mbarrier.wait(smem_full.index(stage), step // STAGES & 1)
            issued = warpgroup_mma(tiles_a.index(2 * stage + WHICH), tiles_b.index(stage), total, is_async=True)
            # One product stays under way; the one before it is over, and its stage read.
            total = warpgroup_mma_wait(1, deps=[issued])
            mbarrier.arrive(smem_empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
            step += 1
        total = warpgroup_mma_wait(0, deps=[total])
        mbarrier.arrive(smem_empty.index((step + STAGES - 1) % STAGES), count=1)
        tracing.record_event_end(work)
        mbarrier.wait(epilogue_empty.index(0), turn & 1 ^ 1)
        products.index(WHICH).store(total.to(products.dtype))
        block_barrier()
        mbarrier.arrive(epilogue_full.index(0), count=1)


@gluon.jit
def _write(ctx, c, products, epilogue_full, epilogue_empty, M, N, stride_cm, stride_cn, turns):
    """The writer. A strip of rows is loaded once, and goes to one rank after the other, the right neighbour first."""
    HALF: gl.constexpr = products.shape[1]
    BLOCK_N: gl.constexpr = products.shape[2]
    layout: gl.constexpr = _lines(BLOCK_N)
    for turn in range(turns):
        row, column = _tile_offsets(turn, M, N, BLOCK_M=2 * HALF, BLOCK_N=BLOCK_N)
        columns = column + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
        mbarrier.wait(epilogue_full.index(0), turn & 1)
        for half in range(2):
            for first in gl.static_range(0, HALF, STRIP):
                data = products.index(half).slice(first, STRIP).load(layout)
                rows = row + half * HALF + first + gl.arange(0, STRIP, gl.SliceLayout(1, layout))
                at = rows.to(gl.int64)[:, None] * stride_cm + columns.to(gl.int64)[None, :] * stride_cn
                mask = (rows < M)[:, None] & (columns < N)[None, :]
                for distance in range(1, ctx.num_ranks + 1):
                    ctx.store(c + at, data, (ctx.cur_rank + distance) % ctx.num_ranks, mask=mask)
        block_barrier()
        mbarrier.arrive(epilogue_empty.index(0), count=1)


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def gemm_all_scatter(
    context_tensor, a, b, c, M, N, K, stride_cm, stride_cn, W: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """``c = a b`` on every rank. ``c``: this rank's ``N`` columns of the result, the same place everywhere.

    ``a``, ``b``: tensor descriptors, of blocks of half a tile's rows by BLOCK_K, and of BLOCK_K by a tile's columns.
    """
    HALF: gl.constexpr = a.block_type.shape[0]
    BLOCK_K: gl.constexpr = b.block_type.shape[0]
    BLOCK_N: gl.constexpr = b.block_type.shape[1]
    ctx = IrisDeviceCtx.initialize(context_tensor, num_ranks=W)
    tiles = gl.cdiv(M, 2 * HALF) * gl.cdiv(N, BLOCK_N)
    turns = gl.cdiv(tiles - gl.program_id(0), gl.num_programs(0))
    tiles_a = gl.allocate_shared_memory(a.dtype, [2 * STAGES, HALF, BLOCK_K], a.layout)
    tiles_b = gl.allocate_shared_memory(b.dtype, [STAGES, BLOCK_K, BLOCK_N], b.layout)
    rounded: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, BLOCK_N], c.dtype.element_ty)
    products = gl.allocate_shared_memory(c.dtype.element_ty, [2, HALF, BLOCK_N], rounded)
    smem_full, smem_empty, epilogue_full, epilogue_empty = (
        _barriers(STAGES, 1),
        _barriers(STAGES, 2),
        _barriers(1, 2),
        _barriers(1, 1),
    )
    # TMA completes barriers, by another way to shared memory than the stores that have initialised them.
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    ctx.tracing,
                    tiles_a,
                    tiles_b,
                    products,
                    smem_full,
                    smem_empty,
                    epilogue_full,
                    epilogue_empty,
                    K,
                    turns,
                    0,
                ),
            ),
            (
                _multiply,
                (
                    ctx.tracing,
                    tiles_a,
                    tiles_b,
                    products,
                    smem_full,
                    smem_empty,
                    epilogue_full,
                    epilogue_empty,
                    K,
                    turns,
                    1,
                ),
            ),
            (_write, (ctx, c, products, epilogue_full, epilogue_empty, M, N, stride_cm, stride_cn, turns)),
            (_load, (a, b, tiles_a, tiles_b, smem_full, smem_empty, M, N, K, turns)),
        ],
        WARPS,
        REGISTERS,
    )
