"""out = the rows of all ranks' A, times B: copy engines send A, and the loader waits for what it fetches.

A rank's rows are cut in chunks. `start` meets all ranks, so that their memory may be written; then the copy engine
sends each chunk to a peer, and after it, on the same stream, one word: the epoch, into ``arrived`` of that chunk there
(`iris.ops.hopper.sender`). All multiprocessors multiply, from the rank's own rows on, which nobody has to send; then
the rows of its right neighbour, and so on, which is the order in which they come. What comes last may be multiplied by
several programs a tile (`iris.ops.hopper.split_k`).

A copy takes time however small it is, and for each chunk all of B is read again. So chunks are long: they have
``together`` times ``chunk`` rows. Those of the rank that comes last have ``chunk`` rows, since programs wait for them.

Over the link, each rank: its ``[m, K]`` of A to every peer, W - 1 times m K elements out, in one step. No
multiprocessor moves any of it (docs/performance-lessons.md, "Copy engines").

Why a chunk is there when its word is: copies of a stream follow each other (CUDA C++ Programming Guide, "Streams").
That a kernel which runs on the peer meanwhile sees them in this order is what the hardware does, and not what the guide
promises; `tests/ops/test_rounds.py` looks for the opposite. The loader reads the word with acquire, and orders its TMA
after that. Why both may be written again in the next call: its `start` is a barrier of all ranks, which a rank reaches
when its last call is over.
"""

import triton
import triton.language as tl
from triton.experimental.gluon import language as gl

from iris.language.context import DeviceContext
from iris.language.dependent_launch import gdc_wait
from iris.language.fences import order_bulk_copies
from iris.language.jit import gluon_jit
from iris.language.jit import triton_aggregate as aggregate
from iris.ops.counts import ARRIVED, await_ready, begin, end
from iris.ops.gemm import swizzle_tile
from iris.ops.hopper.pipeline import REGISTERS, WARPS, load_tile, make_pipeline, multiply
from iris.ops.hopper.split_k import Units
from iris.ops.hopper.tile_scheduler import await_next, publish_next
from iris.ops.hopper.writer import await_products, free_products, store_products


@triton.jit
def start(context_tensor, counts, W: tl.constexpr):
    """One program: the next epoch, in ``counts[0]``, once all ranks' memory may be written. A word to each peer."""
    gdc_wait()
    ctx = DeviceContext.initialize(context_tensor, num_ranks=W)
    epoch = begin(ctx, counts)
    await_ready(ctx, counts, epoch)
    end(counts, epoch)


@aggregate
class Order:
    """The tiles of all ranks' rows, by number: this rank's first, then its right neighbour's, and so on."""

    rank: gl.tensor
    m: gl.tensor
    chunk: gl.tensor
    together: gl.tensor
    rows: gl.tensor
    columns: gl.tensor
    W: gl.constexpr
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    GROUP: gl.constexpr

    @triton.constexpr_function
    def __init__(self, rank, m, chunk, together, rows, columns, W, BLOCK_M, BLOCK_N, GROUP):
        self.rank = rank
        self.m = m
        self.chunk = chunk
        self.together = together
        self.rows = rows
        self.columns = columns
        self.W = gl.constexpr(W)
        self.BLOCK_M = gl.constexpr(BLOCK_M)
        self.BLOCK_N = gl.constexpr(BLOCK_N)
        self.GROUP = gl.constexpr(GROUP)

    @gluon_jit
    def chunks(self):
        """Of one rank at most."""
        return gl.cdiv(self.m, self.chunk)

    @gluon_jit
    def rows_of_chunk(self, owner):
        """Of this rank's or another's."""
        return gl.where(owner == (self.rank + self.W - 1) % self.W, self.chunk, self.chunk * self.together)

    @gluon_jit
    def tiles(self):
        """Of one rank, along its rows and along the columns."""
        return gl.cdiv(self.m, self.BLOCK_M), gl.cdiv(self.columns, self.BLOCK_N)

    @gluon_jit
    def count(self):
        tiles_m, tiles_n = self.tiles()
        return self.W * tiles_m * tiles_n

    @gluon_jit
    def locate(self, tile):
        """Whose rows a tile is of, in which chunk of them, its first row among them, and its first column."""
        tiles_m, tiles_n = self.tiles()
        owner, theirs = (self.rank + tile // (tiles_m * tiles_n)) % self.W, tile % (tiles_m * tiles_n)
        chunk = self.rows_of_chunk(owner)
        in_chunk = chunk // self.BLOCK_M
        nth = theirs // (in_chunk * tiles_n)
        # The last chunk may have fewer rows.
        height = gl.minimum(in_chunk, tiles_m - nth * in_chunk)
        pid_m, pid_n = swizzle_tile(theirs % (in_chunk * tiles_n), height, tiles_n, self.GROUP)
        return owner, nth, nth * chunk + pid_m * self.BLOCK_M, pid_n * self.BLOCK_N

    @gluon_jit
    def at(self, tile):
        """The first row and column of a tile, in the result."""
        owner, _, row, column = self.locate(tile)
        return owner * self.m + row, column


@gluon_jit
def load(pipeline, units, order, ctx, counts, a, gathered, b, K, TILING: gl.constexpr):
    """The loader's part."""
    TRANS_B: gl.constexpr = TILING.TRANS_B
    chunks = order.chunks()
    number, nth, step = gl.program_id(0), 0, 0
    while number < units.count():
        tile, split, splits = units.at(number)
        owner, chunk, row, column = order.locate(tile)
        if owner == order.rank:
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
                TRANS_A=False,
                TRANS_B=TRANS_B,
            )
        else:
            ctx.wait(counts + ARRIVED + owner * chunks + chunk, units.epoch, cmp="reached")
            order_bulk_copies()
            row += owner * chunks * order.chunk
            step = load_tile(
                pipeline,
                gathered,
                b,
                row=row,
                column=column,
                K=K,
                split=split,
                splits=splits,
                step=step,
                TRANS_A=False,
                TRANS_B=TRANS_B,
            )
        number = publish_next(pipeline, units, number, nth)
        nth += 1


@gluon_jit
def write(pipeline, units, order, bias, out):
    """The writer's part."""
    number, nth, done = gl.program_id(0), 0, 0
    while number < units.count():
        tile, split, splits = units.at(number)
        if split == splits - 1:
            owner, _, row, column = order.locate(tile)
            begin, stop = owner * order.m, (owner + 1) * order.m
            await_products(pipeline, done)
            store_products(pipeline, bias, out, begin + row, column=column, rows=stop, N=order.columns)
            free_products(pipeline)
            done += 1
        number = await_next(pipeline, units, number, nth)
        nth += 1


# Triton would make a constant of a number that is 1, and compile anew.
@gluon_jit(do_not_specialize=["m", "together", "splits", "last"])
def hopper_all_gather_matmul(
    channel,
    tensor_map_a,
    tensor_map_gathered,
    tensor_map_b,
    epilogue,
    out,
    split_tiles,
    m,
    together,
    extents,
    splits,
    last,
    W: gl.constexpr,
    TILING: gl.constexpr,
):
    """A is this rank's ``[m, K]``, gathered ``[W, chunks * chunk, K]``, by rows; ``out``: ``[W * m, N]``, anywhere.

    ``extents.chunk``: a multiple of ``BLOCK_M``. Rows that arrive together begin where a tile does, so that none is
    fetched while it arrives. The rows of a tile past a rank's last one are padding.

    ``epilogue``: its scales are float32, one number each, or with ``SCALE_A_PER_ROW`` ``[W * m]`` and with
    ``SCALE_B_PER_COLUMN`` ``[N]``; or None.
    ``splits``, ``last``, ``split_tiles``: of tiles that are split (`iris.ops.hopper.split_k`).
    """
    gdc_wait()
    ctx, counts = DeviceContext.initialize(channel.context, num_ranks=W), channel.counts
    epoch = gl.load(counts)
    pipeline = make_pipeline(tensor_map_a, tensor_map_b, out.ptr.dtype.element_ty, TILING, BY_TICKETS=False)
    order = Order(
        rank=ctx.cur_rank,
        m=m,
        chunk=extents.chunk,
        together=together,
        rows=W * m,
        columns=extents.N,
        W=W,
        BLOCK_M=TILING.BLOCK_M,
        BLOCK_N=TILING.BLOCK_N,
        GROUP=TILING.GROUP,
    )
    units = Units(
        tiles=order.count(),
        splits=splits,
        last=last,
        partials=split_tiles.partials,
        arrived=split_tiles.arrived,
        epoch=epoch,
        ticket=counts,
        SPLIT=TILING.SPLIT,
    )
    gl.warp_specialize(
        [
            (multiply, (pipeline, ctx, units, order, epilogue, extents.K, 0, TILING)),
            (multiply, (pipeline, ctx, units, order, epilogue, extents.K, 1, TILING)),
            (write, (pipeline, units, order, epilogue.bias, out)),
            (
                load,
                (
                    pipeline,
                    units,
                    order,
                    ctx,
                    counts,
                    tensor_map_a,
                    tensor_map_gathered,
                    tensor_map_b,
                    extents.K,
                    TILING,
                ),
            ),
        ],
        WARPS,
        REGISTERS,
    )
