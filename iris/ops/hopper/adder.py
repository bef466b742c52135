"""The adder's part of a sum: what all ranks have sent of this rank's tiles, added up by a warp of its own.

A unit is a panel of a tile, so that the last tiles, which come after all products, are shared by many programs. Who is
done with one takes the next (`iris.ops.hopper.tile_scheduler`). Parts lie in this rank's memory, a slice for each rank.
A warp does not have the registers to load as much at a time as hides what that takes; copies by TMA need none. So
pieces of `STRIP` rows by `PANEL` columns arrive in a ring in shared memory, and each that has been used makes room for
the next one. Sums are stored from registers, to this rank or to all.

``landed[s]``, an mbarrier: the bytes of slot s are there. Completed by TMA, awaited by the adder, which fetches into
the slot again after a barrier of its warp, when all threads have read it.
"""

import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from iris.language.fences import block_barrier, order_bulk_copies
from iris.language.jit import gluon_jit
from iris.language.jit import triton_aggregate as aggregate
from iris.ops.counts import ARRIVED, await_done
from iris.ops.hopper.pipeline import PANEL, barriers, fetch
from iris.ops.hopper.tile_scheduler import take
from iris.ops.hopper.writer import STRIP

# Pieces in shared memory, 4 KiB each: what fits beside a pipeline with tiles of 128 x 256.
SLOTS = gl.constexpr(4)
# Of a strip, 64 elements a thread.
LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0]))


@aggregate
class Landing:
    """The slots: ``pieces[s]`` is ``[1, STRIP, PANEL]``, the shape in which TMA takes a piece of one rank's part."""

    pieces: gl.shared_memory_descriptor
    landed: gl.shared_memory_descriptor

    @triton.constexpr_function
    def __init__(self, pieces, landed):
        self.pieces = pieces
        self.landed = landed


@gluon_jit
def make_landing(parts):
    """For pieces that the descriptor ``parts`` fetches. `make_pipeline` comes next, and shows the barriers to TMA."""
    pieces = gl.allocate_shared_memory(parts.dtype, [SLOTS, 1, STRIP, PANEL], parts.layout)
    return Landing(pieces, barriers(SLOTS, 1))


@gluon_jit
def fetch_piece(landing, parts, W: gl.constexpr, row, column, number, begun):
    """Piece ``number`` of the panel at these rows and columns: of each strip every rank's, in their order."""
    slot = (begun + number) % SLOTS
    full = landing.landed.index(slot)
    mbarrier.expect(full, parts.block_type.nbytes)
    fetch(parts, [number % W, row + number // W * STRIP, column], full, landing.pieces.index(slot))


@gluon_jit
def add(pipeline, landing, units, order, ctx, counts, parts, bias, out, out_ctx, TILING: gl.constexpr):
    """The adder's part: sums of this rank's rows, to ``out``, or all ranks' copies of it, in the memory of ``out_ctx``.

    ``parts``: the descriptor of ``[W, share, N]`` that all ranks store to. Parts are added in float32 and in the order
    of ranks. A tile is there when all ranks have told so: with release after their stores, and the wait acquires.
    """
    W: gl.constexpr = ctx.num_ranks
    PANELS: gl.constexpr = pipeline.products.shape[0] // 2
    HALF: gl.constexpr = pipeline.products.shape[2]
    STRIPS: gl.constexpr = HALF // STRIP
    PIECES: gl.constexpr = STRIPS * W
    gl.static_assert(gl.num_warps() == 1, "the adder is a warp")
    rows, N = order.rows_of(order.rank), order.columns
    tiles_m, tiles_n = order.tiles()
    count = tiles_m * tiles_n * 2 * PANELS
    unit, begun = gl.program_id(0), 0
    while unit < count:
        tile, panel = unit // (2 * PANELS), unit % (2 * PANELS)
        row, column = order.in_share(tile)
        row += panel // PANELS * HALF
        column += panel % PANELS * PANEL
        ctx.wait(counts + ARRIVED + tile, units.epoch * W, cmp="reached")
        order_bulk_copies()
        for number in gl.static_range(min(SLOTS, PIECES)):
            fetch_piece(landing, parts, W=W, row=row, column=column, number=number, begun=begun)
        # While the first pieces are on their way. Panels have a ticket of their own, after that of tiles.
        following = take(units.ticket + 1, count, units.epoch)
        columns = column + gl.arange(0, PANEL, gl.SliceLayout(0, LAYOUT))
        number = 0
        for strip in range(STRIPS):
            total = gl.zeros([STRIP, PANEL], gl.float32, LAYOUT)
            for _ in gl.static_range(W):
                slot = (begun + number) % SLOTS
                mbarrier.wait(landing.landed.index(slot), (begun + number) // SLOTS & 1)
                total += landing.pieces.index(slot).reshape([STRIP, PANEL]).load(LAYOUT).to(gl.float32)
                block_barrier()
                if number + SLOTS < PIECES:
                    fetch_piece(landing, parts, W=W, row=row, column=column, number=number + SLOTS, begun=begun)
                number += 1
            if bias is not None:
                total += gl.load(bias + columns, mask=columns < N, other=0).to(gl.float32)[None, :]
            sums = total.to(parts.dtype)
            lines = row + strip * STRIP + gl.arange(0, STRIP, gl.SliceLayout(1, LAYOUT))
            mask = (lines < rows)[:, None] & (columns < N)[None, :]
            at_n = columns.to(gl.int64)[None, :] * out.column_stride
            if TILING.ALL_REDUCE:
                there = out.ptr + ((order.rank * order.share + lines).to(gl.int64)[:, None] * out.row_stride + at_n)
                for distance in gl.static_range(1, W + 1):
                    out_ctx.store(there, sums, (order.rank + distance) % W, mask=mask)
            else:
                gl.store(out.ptr + (lines.to(gl.int64)[:, None] * out.row_stride + at_n), sums, mask=mask)
        begun += PIECES
        unit = following
    if TILING.ALL_REDUCE:
        await_done(ctx, counts, units.epoch)
