"""out = the rows of every rank's A B, on every rank: the writer sends each tile to all ranks.

Over the link, each rank: its ``[M, N]`` of the result to every peer, W - 1 times M N elements out, in one step. The
sending of a tile goes on beside the product of the next one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris.language.context import IrisDeviceCtx
from iris.language.ordering import gluon_ordering
from iris.ops.counts import gluon_counts
from iris.ops.gemm import gluon_place
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
)

await_bulk_stores = gluon_ordering.await_bulk_stores
await_done, await_ready, begin, end, follow_predecessor = (
    gluon_counts.await_done, gluon_counts.await_ready, gluon_counts.begin, gluon_counts.end,
    gluon_counts.follow_predecessor,
)  # fmt: skip


@gluon.jit
def load(pipeline, a, b, M, N, K, GROUP: gl.constexpr, BY_COLUMNS_A: gl.constexpr, BY_COLUMNS_B: gl.constexpr):
    """The loader's part."""
    BLOCK_M: gl.constexpr = 2 * pipeline.products.shape[2]
    BLOCK_N: gl.constexpr = pipeline.products.shape[0] // 2 * pipeline.products.shape[3]
    tiles_m, tiles_n = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N)
    step = 0
    for number in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        pid_m, pid_n = gluon_place(number, tiles_m, tiles_n, GROUP)
        step = load_tile(pipeline, a, b, pid_m * BLOCK_M, pid_n * BLOCK_N, K, step, BY_COLUMNS_A, BY_COLUMNS_B)


@gluon.jit
def write(pipeline, ctx, counts, epoch, bias, peers, places, M, N, GROUP: gl.constexpr, BIASED: gl.constexpr):
    """The writer's part."""
    BLOCK_M: gl.constexpr = 2 * pipeline.products.shape[2]
    BLOCK_N: gl.constexpr = pipeline.products.shape[0] // 2 * pipeline.products.shape[3]
    tiles_m, tiles_n = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N)
    await_ready(ctx, counts, epoch)
    done = 0
    for number in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        pid_m, pid_n = gluon_place(number, tiles_m, tiles_n, GROUP)
        await_products(pipeline, done)
        if BIASED:
            add_bias(pipeline, bias, pid_n * BLOCK_N, N)
        send_products_to_all(
            pipeline, ctx, peers, places, counts, pid_m * BLOCK_M, pid_n * BLOCK_N, M, N
        )  # fmt: skip
        free_products(pipeline)
        done += 1
    await_bulk_stores()
    await_done(ctx, counts, epoch)


@gluon.jit
def hopper_matmul_all_gather(
    context_tensor,
    counts,
    tensor_map_a,
    tensor_map_b,
    bias,
    tensor_map_peers,
    places,
    M,
    N,
    K,
    W: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    BY_COLUMNS_A: gl.constexpr,
    BY_COLUMNS_B: gl.constexpr,
    BIASED: gl.constexpr,
):
    """``tensor_map_peers``: this rank's ``[M, N]`` of the result on every rank, at ``places``, int32 ``[W]``."""
    follow_predecessor()
    ctx = IrisDeviceCtx.initialize(context_tensor, num_ranks=W)
    epoch = begin(ctx, counts)
    pipeline = make_pipeline(tensor_map_a, tensor_map_b, tensor_map_peers.dtype, BLOCK_M, BLOCK_N, STAGES)
    tiles = gl.cdiv(gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N) - gl.program_id(0), gl.num_programs(0))
    gl.warp_specialize(
        [
            (multiply, (pipeline, ctx.tracing, tiles, K, 0, BY_COLUMNS_A, BY_COLUMNS_B)),
            (multiply, (pipeline, ctx.tracing, tiles, K, 1, BY_COLUMNS_A, BY_COLUMNS_B)),
            (write, (pipeline, ctx, counts, epoch, bias, tensor_map_peers, places, M, N, GROUP, BIASED)),
            (load, (pipeline, tensor_map_a, tensor_map_b, M, N, K, GROUP, BY_COLUMNS_A, BY_COLUMNS_B)),
        ],
        WARPS,
        REGISTERS,
    )
    end(counts, epoch)
