"""out = the rows of every rank's A B, on every rank: the writer sends each tile to all ranks.

Over the link, each rank: its ``[M, N]`` of the result to every peer, W - 1 times M N elements out, in one step. The
sending of a tile goes on beside the product of the next one, and takes as long where there is the time
(`iris.ops.hopper.pace`). The tiles of the last round may be split (`iris.ops.hopper.split_k`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris.language.context import IrisDeviceCtx
from iris.language.ordering import gluon_ordering
from iris.ops.counts import gluon_counts
from iris.ops.gemm import gluon_place
from iris.ops.hopper.pace import at_once, until_next
from iris.ops.hopper.pipeline import (
    REGISTERS,
    WARPS,
    add_bias,
    await_products,
    free_products,
    load_tile,
    make_pipeline,
    multiply,
    send_products_to_all,
    strips_of,
)
from iris.ops.hopper.split_k import Units

await_bulk_stores = gluon_ordering.await_bulk_stores
await_done, await_ready, begin, end, follow_predecessor = (
    gluon_counts.await_done, gluon_counts.await_ready, gluon_counts.begin, gluon_counts.end,
    gluon_counts.follow_predecessor,
)  # fmt: skip


@gluon.jit
def load(pipeline, units, a, b, M, N, K, GROUP: gl.constexpr, BY_COLUMNS_A: gl.constexpr, BY_COLUMNS_B: gl.constexpr):
    """The loader's part."""
    BLOCK_M: gl.constexpr = 2 * pipeline.products.shape[2]
    BLOCK_N: gl.constexpr = pipeline.products.shape[0] // 2 * pipeline.products.shape[3]
    tiles_m, tiles_n = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N)
    step = 0
    for number in range(gl.program_id(0), units.count(), gl.num_programs(0)):
        tile, split, splits = units.at(number)
        pid_m, pid_n = gluon_place(tile, tiles_m, tiles_n, GROUP)
        row, column = pid_m * BLOCK_M, pid_n * BLOCK_N
        step = load_tile(pipeline, a, b, row, column, K, split, splits, step, BY_COLUMNS_A, BY_COLUMNS_B)


@gluon.jit
def write(
    pipeline, units, ctx, counts, bias, peers, places, M, N, PACED: gl.constexpr, GROUP: gl.constexpr,
    BIASED: gl.constexpr,
):  # fmt: skip
    """The writer's part."""
    BLOCK_M: gl.constexpr = 2 * pipeline.products.shape[2]
    BLOCK_N: gl.constexpr = pipeline.products.shape[0] // 2 * pipeline.products.shape[3]
    tiles_m, tiles_n = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N)
    await_ready(ctx, counts, units.epoch)
    done = 0
    for number in range(gl.program_id(0), units.count(), gl.num_programs(0)):
        tile, split, splits = units.at(number)
        if split == splits - 1:
            pid_m, pid_n = gluon_place(tile, tiles_m, tiles_n, GROUP)
            row, column = pid_m * BLOCK_M, pid_n * BLOCK_N
            await_products(pipeline, done)
            pace = until_next(pipeline.took, units, number, splits, strips_of(pipeline)) if PACED else at_once()
            if BIASED:
                add_bias(pipeline, bias, column, N)
            send_products_to_all(pipeline, pace, ctx, peers, places, counts, row, column, M, N)
            free_products(pipeline)
            done += 1
    await_bulk_stores()
    await_done(ctx, counts, units.epoch)


# A number of tiles may be 1, and is no constant then.
@gluon.jit(do_not_specialize=["splits", "last"])
def hopper_matmul_all_gather(
    context_tensor,
    counts,
    tensor_map_a,
    tensor_map_b,
    bias,
    tensor_map_peers,
    places,
    partials,
    arrived,
    M,
    N,
    K,
    splits,
    last,
    W: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    SPLIT: gl.constexpr,
    PACED: gl.constexpr,
    GROUP: gl.constexpr,
    BY_COLUMNS_A: gl.constexpr,
    BY_COLUMNS_B: gl.constexpr,
    BIASED: gl.constexpr,
):
    """``tensor_map_peers``: this rank's ``[M, N]`` of the result on every rank, at ``places``, int32 ``[W]``.

    ``splits``, ``last``, ``partials``, ``arrived``: of tiles that are split (`iris.ops.hopper.split_k`).
    """
    follow_predecessor()
    ctx = IrisDeviceCtx.initialize(context_tensor, num_ranks=W)
    epoch = begin(ctx, counts)
    pipeline = make_pipeline(tensor_map_a, tensor_map_b, tensor_map_peers.dtype, BLOCK_M, BLOCK_N, STAGES)
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    units = Units(tiles, splits, last, partials, arrived, epoch, SPLIT)
    gl.warp_specialize(
        [
            (multiply, (pipeline, ctx, units, K, 0, BY_COLUMNS_A, BY_COLUMNS_B, PACED)),
            (multiply, (pipeline, ctx, units, K, 1, BY_COLUMNS_A, BY_COLUMNS_B, PACED)),
            (write, (pipeline, units, ctx, counts, bias, tensor_map_peers, places, M, N, PACED, GROUP, BIASED)),
            (load, (pipeline, units, tensor_map_a, tensor_map_b, M, N, K, GROUP, BY_COLUMNS_A, BY_COLUMNS_B)),
        ],
        WARPS,
        REGISTERS,
    )
    end(counts, epoch)
