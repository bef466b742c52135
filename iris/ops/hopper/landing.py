"""What peers have sent of a tile, fetched by TMA ahead of its sum.

Peers' parts lie in this rank's memory, and a load of them takes longer than to add them up. Two warps do not have the
registers to load as much at a time as hides that; copies by TMA need none. So pieces of `STRIP` rows by `PANEL` columns
arrive in a ring of slots in shared memory, and each that has been used makes room for the one `SLOTS` further on.

``landed[s]``, an mbarrier: the bytes of slot s are there. Completed by TMA, awaited by the writer, which fetches into
the slot again behind a barrier of its warps, when all have read it.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from iris.language.context import aggregate
from iris.ops.hopper.pipeline import PANEL, barriers, block_barrier, fetch
from iris.ops.hopper.writer import STRIP, STRIP_LAYOUT, columns_of, rows_of, show_to_tma, strip_of

# What fits beside a pipeline with tiles of 128 x 256: 4 KiB each.
SLOTS = gl.constexpr(4)


@aggregate
class Landing:
    """The slots: ``pieces[s]`` is ``[1, STRIP, PANEL]``, the shape in which TMA takes a piece of one rank's part."""

    pieces: gl.shared_memory_descriptor
    landed: gl.shared_memory_descriptor

    @triton.constexpr_function
    def __init__(self, pieces, landed):
        self.pieces = pieces
        self.landed = landed


@gluon.jit
def make_landing(parts):
    """For pieces that the descriptor ``parts`` fetches. `make_pipeline` comes behind, and shows the barriers to TMA."""
    pieces = gl.allocate_shared_memory(parts.dtype, [SLOTS, 1, STRIP, PANEL], parts.layout)
    return Landing(pieces, barriers(SLOTS, 1))


@gluon.jit
def fetch_piece(pipeline, landing, parts, rank, W: gl.constexpr, row, column, number, begun):
    """Piece ``number`` of the tile at these rows and columns: of each strip the other ranks' pieces, rank by rank."""
    PANELS: gl.constexpr = pipeline.products.shape[0] // 2
    HALF: gl.constexpr = pipeline.products.shape[2]
    strip, nth = number // (W - 1), number % (W - 1)
    panel, strip = strip // (HALF // STRIP), strip % (HALF // STRIP)
    source = nth + gl.where(nth < rank, 0, 1)
    slot = (begun + number) % SLOTS
    full = landing.landed.index(slot)
    mbarrier.expect(full, parts.block_type.nbytes)
    at = [source, row + panel // PANELS * HALF + strip * STRIP, column + panel % PANELS * PANEL]
    fetch(parts, at, full, landing.pieces.index(slot))


@gluon.jit
def add_parts(
    pipeline, landing, parts, begun, bias, out, rank, W: gl.constexpr, row, column, rows, N, stride_om, stride_on,
    SPREADS: gl.constexpr, BIASED: gl.constexpr,
):  # fmt: skip
    """The sums of a tile of this rank's rows from ``row`` on: into ``out``, or in the place of the products.

    ``parts``: the descriptor of ``[W, rows, N]`` that peers have stored to; what was acquired of it is ordered before.
    In float32 and in the order of ranks; this rank's part is the products. ``begun``: pieces that were fetched before
    this tile; the new number is returned.
    """
    TURNS: gl.constexpr = pipeline.products.shape[2] // STRIP
    PIECES: gl.constexpr = pipeline.products.shape[0] * TURNS * (W - 1)
    if W > 1:
        for number in gl.static_range(SLOTS):
            fetch_piece(pipeline, landing, parts, rank, W, row, column, number, begun)
    number = 0
    for panel in range(pipeline.products.shape[0]):
        columns = column + columns_of(pipeline, panel)
        for strip in gl.static_range(TURNS):
            memory = strip_of(pipeline, panel, strip)
            own = memory.load(STRIP_LAYOUT)
            total = gl.zeros_like(own).to(gl.float32)
            for source in gl.static_range(W):
                part = own
                if source != rank:
                    slot = (begun + number) % SLOTS
                    mbarrier.wait(landing.landed.index(slot), (begun + number) // SLOTS & 1)
                    part = landing.pieces.index(slot).reshape([STRIP, PANEL]).load(STRIP_LAYOUT)
                    block_barrier()
                    if number + SLOTS < PIECES:
                        fetch_piece(pipeline, landing, parts, rank, W, row, column, number + SLOTS, begun)
                    number += 1
                total += part.to(gl.float32)
            if BIASED:
                total += gl.load(bias + columns, mask=columns < N, other=0).to(gl.float32)[None, :]
            if SPREADS:
                memory.store(total.to(own.dtype))
            else:
                lines = row + rows_of(pipeline, panel, strip)
                mask = (lines < rows)[:, None] & (columns < N)[None, :]
                there = out + (lines.to(gl.int64)[:, None] * stride_om + columns.to(gl.int64)[None, :] * stride_on)
                gl.store(there, total.to(own.dtype), mask=mask)
    if SPREADS:
        show_to_tma()
    return begun + PIECES
