"""out = the sum of all ranks' A B: its rows shared among the ranks, or all of them on every rank.

Each rank computes a tile of every rank's rows, by turns, and the writer sends it to whom it belongs: its own to its own
memory. A fifth role, the adder, adds up what has come of this rank's tiles (`iris.ops.hopper.adder`), and for all rows
on every rank sends the sums to all. So neither the multipliers nor the writer wait for peers, and the link is busy from
the first tile on.

Over the link, each rank: (W - 1) / W times M N elements out, in one step; for all rows twice that, in two. Parts travel
in the type of the result, as they do through the vendor's library. Through the L2 cache besides: this rank's own part,
out and in.

Nobody waits in a circle: adders wait for writers, and these for nobody but the link.
"""

import triton
from triton.experimental.gluon import language as gl

from iris.language.context import DeviceContext
from iris.language.dependent_launch import gdc_wait
from iris.language.jit import gluon_jit
from iris.language.jit import triton_aggregate as aggregate
from iris.ops.counts import ARRIVED, await_ready, begin, end
from iris.ops.gemm import swizzle_tile
from iris.ops.hopper.adder import add, make_landing
from iris.ops.hopper.pipeline import REGISTERS, WARPS, load_tile, make_pipeline, multiply
from iris.ops.hopper.split_k import whole_tiles
from iris.ops.hopper.tile_scheduler import await_next, publish_next
from iris.ops.hopper.writer import await_products, free_products, keep_products, send_products

# And the adder's: a warp beside the writer and the loader, which share a number of registers.
WARPS_WITH_ADDER = gl.constexpr([*WARPS.value, 1])
REGISTERS_WITH_ADDER = gl.constexpr([*REGISTERS.value, REGISTERS.value[-1]])


@aggregate
class Order:
    """The tiles of all ranks' rows, by number: the first of each rank's, this rank's last, then the second of each, ...

    At all times some programs of each rank send to every other: where all sent to one they met, sooner or later, at the
    same receiver.
    """

    rank: gl.tensor
    share: gl.tensor
    rows: gl.tensor
    columns: gl.tensor
    W: gl.constexpr
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    GROUP: gl.constexpr

    @triton.constexpr_function
    def __init__(self, rank, share, rows, columns, W, BLOCK_M, BLOCK_N, GROUP):
        self.rank = rank
        self.share = share
        self.rows = rows
        self.columns = columns
        self.W = gl.constexpr(W)
        self.BLOCK_M = gl.constexpr(BLOCK_M)
        self.BLOCK_N = gl.constexpr(BLOCK_N)
        self.GROUP = gl.constexpr(GROUP)

    @gluon_jit
    def tiles(self):
        """Of one rank, along its rows and along the columns."""
        return gl.cdiv(self.share, self.BLOCK_M), gl.cdiv(self.columns, self.BLOCK_N)

    @gluon_jit
    def count(self):
        tiles_m, tiles_n = self.tiles()
        return self.W * tiles_m * tiles_n

    @gluon_jit
    def rows_of(self, owner):
        """How many rows of the sum are a rank's: of the last ones fewer, or none."""
        return gl.minimum(self.share, self.rows - owner * self.share)

    @gluon_jit
    def in_share(self, tile):
        """The first row of a rank's tile among its rows, and its first column."""
        tiles_m, tiles_n = self.tiles()
        pid_m, pid_n = swizzle_tile(tile, tiles_m, tiles_n, self.GROUP)
        return pid_m * self.BLOCK_M, pid_n * self.BLOCK_N

    @gluon_jit
    def locate(self, number):
        """Whose rows a tile is of, and which of theirs it is."""
        return (self.rank + 1 + number % self.W) % self.W, number // self.W

    @gluon_jit
    def at(self, number):
        """The first row and column of a tile, of A and of B."""
        owner, tile = self.locate(number)
        row, column = self.in_share(tile)
        return owner * self.share + row, column


@gluon_jit
def load(pipeline, units, order, a, b, K, TILING: gl.constexpr):
    """The loader's part."""
    TRANS_A: gl.constexpr = TILING.TRANS_A
    TRANS_B: gl.constexpr = TILING.TRANS_B
    number, nth, step = gl.program_id(0), 0, 0
    while number < units.count():
        row, column = order.at(number)
        step = load_tile(
            pipeline, a, b, row=row, column=column, K=K, split=0, splits=1, step=step, TRANS_A=TRANS_A, TRANS_B=TRANS_B
        )
        number = publish_next(pipeline, units, number, nth)
        nth += 1


@gluon_jit
def write(pipeline, units, order, ctx, counts, peers_parts, parts_places):
    """The writer's part."""
    await_ready(ctx, counts, units.epoch)
    number, done = gl.program_id(0), 0
    while number < units.count():
        owner, tile = order.locate(number)
        row, column = order.in_share(tile)
        await_products(pipeline, done)
        place = gl.load(parts_places + owner)
        if owner == order.rank:
            keep_products(pipeline, peers_parts, place, row=row, column=column)
        else:
            rows = order.rows_of(owner)
            send_products(
                pipeline,
                ctx.tracing,
                peers_parts,
                place,
                like=counts,
                rank=owner,
                row=row,
                column=column,
                rows=rows,
                N=order.columns,
            )
        free_products(pipeline)
        ctx.signal(counts + ARRIVED + tile, 1, owner, op="add")
        number = await_next(pipeline, units, number, done)
        done += 1


# A number of rows may be 1, and is no constant then.
@gluon_jit(do_not_specialize=["M", "share"])
def hopper_matmul_reduce(
    channel,
    out_context,
    tensor_map_parts,
    tensor_map_peers,
    parts_places,
    tensor_map_a,
    tensor_map_b,
    epilogue,
    out,
    M,
    share,
    extents,
    W: gl.constexpr,
    TILING: gl.constexpr,
):
    """``share``: rows that a rank adds up, M over W.

    ``tensor_map_parts``: on this rank ``[W, share, N]``, rank r's products in parts[r]. ``tensor_map_peers``: this
    rank's part on every rank, at ``parts_places``, int32 ``[W]``. ``out``: ``[share, N]``; with ``ALL_REDUCE``
    ``[M, N]``, the same place on every rank, in ``out_context``'s memory. ``epilogue``: its scales are float32, one
    number each, or with ``SCALE_A_PER_ROW`` ``[M]`` and with ``SCALE_B_PER_COLUMN`` ``[N]``; or None.
    """
    gdc_wait()
    ctx, counts = DeviceContext.initialize(channel.context, num_ranks=W), channel.counts
    out_ctx = DeviceContext.initialize(out_context, num_ranks=W)
    epoch = begin(ctx, counts)
    landing = make_landing(tensor_map_parts)
    pipeline = make_pipeline(tensor_map_a, tensor_map_b, tensor_map_parts.dtype, TILING)
    order = Order(
        rank=ctx.cur_rank,
        share=share,
        rows=M,
        columns=extents.N,
        W=W,
        BLOCK_M=TILING.BLOCK_M,
        BLOCK_N=TILING.BLOCK_N,
        GROUP=TILING.GROUP,
    )
    tiles_m, tiles_n = order.tiles()
    units = whole_tiles(order.count(), counts, epoch, counts + ARRIVED + tiles_m * tiles_n)
    gl.warp_specialize(
        [
            (multiply, (pipeline, ctx, units, order, epilogue, extents.K, 0, TILING)),
            (multiply, (pipeline, ctx, units, order, epilogue, extents.K, 1, TILING)),
            (write, (pipeline, units, order, ctx, counts, tensor_map_peers, parts_places)),
            (load, (pipeline, units, order, tensor_map_a, tensor_map_b, extents.K, TILING)),
            (
                add,
                (
                    pipeline,
                    landing,
                    units,
                    order,
                    ctx,
                    counts,
                    tensor_map_parts,
                    epilogue.bias,
                    out,
                    out_ctx,
                    TILING,
                ),
            ),
        ],
        WARPS_WITH_ADDER,
        REGISTERS_WITH_ADDER,
    )
    end(counts, epoch)
