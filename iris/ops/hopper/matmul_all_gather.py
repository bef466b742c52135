"""out = the rows of every rank's A B, on every rank: the writer sends each tile to all ranks.

Over the link, each rank: its ``[M, N]`` of the result to every peer, W - 1 times M N elements out, in one step. The
sending of a tile goes on beside the product of the next one, and takes as long where there is the time
(`iris.ops.hopper.pace`). The tiles of the last round may be split (`iris.ops.hopper.split_k`).
"""

import triton
from triton.experimental.gluon import language as gl

from iris.language.context import DeviceContext
from iris.language.dependent_launch import gdc_wait
from iris.language.fences import await_bulk_stores
from iris.language.jit import gluon_jit
from iris.language.jit import triton_aggregate as aggregate
from iris.ops.counts import ARRIVED, await_done, await_ready, begin, end
from iris.ops.gemm import swizzle_tile
from iris.ops.hopper.pace import at_once, until_next
from iris.ops.hopper.pipeline import REGISTERS, WARPS, load_tile, make_pipeline, multiply
from iris.ops.hopper.split_k import Units
from iris.ops.hopper.tile_scheduler import await_next, publish_next
from iris.ops.hopper.writer import add_bias, await_products, free_products, send_products_to_all, strips_of


@aggregate
class Order:
    """The tiles of a rank's rows of the result, by number."""

    rows: gl.tensor
    columns: gl.tensor
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    GROUP: gl.constexpr

    @triton.constexpr_function
    def __init__(self, rows, columns, BLOCK_M, BLOCK_N, GROUP):
        self.rows = rows
        self.columns = columns
        self.BLOCK_M = gl.constexpr(BLOCK_M)
        self.BLOCK_N = gl.constexpr(BLOCK_N)
        self.GROUP = gl.constexpr(GROUP)

    @gluon_jit
    def count(self):
        return gl.cdiv(self.rows, self.BLOCK_M) * gl.cdiv(self.columns, self.BLOCK_N)

    @gluon_jit
    def at(self, tile):
        """The first row and column of a tile."""
        tiles_m, tiles_n = gl.cdiv(self.rows, self.BLOCK_M), gl.cdiv(self.columns, self.BLOCK_N)
        pid_m, pid_n = swizzle_tile(tile, tiles_m, tiles_n, self.GROUP)
        return pid_m * self.BLOCK_M, pid_n * self.BLOCK_N


@gluon_jit
def load(pipeline, units, order, a, b, K, TILING: gl.constexpr):
    """The loader's part."""
    TRANS_A: gl.constexpr = TILING.TRANS_A
    TRANS_B: gl.constexpr = TILING.TRANS_B
    number, nth, step = gl.program_id(0), 0, 0
    while number < units.count():
        tile, split, splits = units.at(number)
        row, column = order.at(tile)
        step = load_tile(
            pipeline,
            a,
            b,
            row=row,
            column=column,
            K=K,
            split=split,
            splits=splits,
            step=step,
            TRANS_A=TRANS_A,
            TRANS_B=TRANS_B,
        )
        number = publish_next(pipeline, units, number, nth)
        nth += 1


@gluon_jit
def write(pipeline, units, order, ctx, counts, bias, peers, places, TILING: gl.constexpr):
    """The writer's part."""
    await_ready(ctx, counts, units.epoch)
    number, nth, done = gl.program_id(0), 0, 0
    while number < units.count():
        following = await_next(pipeline, units, number, nth)
        tile, split, splits = units.at(number)
        if split == splits - 1:
            row, column = order.at(tile)
            await_products(pipeline, done)
            pace = (
                until_next(pipeline.took, units, following, splits=splits, strips=strips_of(pipeline))
                if TILING.PACED
                else at_once()
            )
            if bias is not None:
                add_bias(pipeline, bias, column, order.columns)
            send_products_to_all(
                pipeline,
                pace,
                ctx,
                peers=peers,
                places=places,
                like=counts,
                row=row,
                column=column,
                rows=order.rows,
                N=order.columns,
            )
            free_products(pipeline)
            done += 1
        number = following
        nth += 1
    # For the strips that stay on this rank: those to peers are there.
    await_bulk_stores()
    await_done(ctx, counts, units.epoch)


# A number of rows or tiles may be 1, and is no constant then.
@gluon_jit(do_not_specialize=["M", "splits", "last"])
def hopper_matmul_all_gather(
    channel,
    tensor_map_a,
    tensor_map_b,
    epilogue,
    tensor_map_peers,
    places,
    split_tiles,
    M,
    N,
    K,
    splits,
    last,
    W: gl.constexpr,
    TILING: gl.constexpr,
):
    """``tensor_map_peers``: this rank's ``[M, N]`` of the result on every rank, at ``places``, int32 ``[W]``.

    ``epilogue``: its scales are float32, one number each, or with ``SCALE_A_PER_ROW`` ``[M]`` and with
    ``SCALE_B_PER_COLUMN`` ``[N]``; or None.
    ``splits``, ``last``, ``split_tiles``: of tiles that are split (`iris.ops.hopper.split_k`).
    """
    gdc_wait()
    ctx, counts = DeviceContext.initialize(channel.context, num_ranks=W), channel.counts
    epoch = begin(ctx, counts)
    pipeline = make_pipeline(tensor_map_a, tensor_map_b, tensor_map_peers.dtype, TILING)
    order = Order(rows=M, columns=N, BLOCK_M=TILING.BLOCK_M, BLOCK_N=TILING.BLOCK_N, GROUP=TILING.GROUP)
    units = Units(
        tiles=order.count(),
        splits=splits,
        last=last,
        partials=split_tiles.partials,
        arrived=split_tiles.arrived,
        epoch=epoch,
        ticket=counts + ARRIVED,
        SPLIT=TILING.SPLIT,
    )
    gl.warp_specialize(
        [
            (multiply, (pipeline, ctx, units, order, epilogue, K, 0, TILING)),
            (multiply, (pipeline, ctx, units, order, epilogue, K, 1, TILING)),
            (write, (pipeline, units, order, ctx, counts, epilogue.bias, tensor_map_peers, places, TILING)),
            (load, (pipeline, units, order, tensor_map_a, tensor_map_b, K, TILING)),
        ],
        WARPS,
        REGISTERS,
    )
    end(counts, epoch)
