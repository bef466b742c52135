"""How products leave the registers of the matrix cores: in strips of columns, 16 bytes of a row with each lane.

Compiled for gfx942 and gfx950 and run in the simulator; never run on an AMD GPU.

A matrix core leaves 4 neighbours of a row with a lane, 32 bytes of each row with a wavefront. Over the link whole lines
of 128 bytes are to go, so 64 columns at a time pass through shared memory, where a step's A and B have been.
"""

from triton.experimental.gluon import language as gl

from iris.language.jit import gluon_jit
from iris.ops.gemm import by_halves

STRIP = gl.constexpr(64)
STRIP_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [8, 8], [8, 1], [1, 0]))


@gluon_jit
def strips(values):
    """The products in strips of `STRIP` columns, from left to right, 16 bytes of a row with each thread."""
    if values.shape[1] == STRIP:
        return (gl.convert_layout(values, STRIP_LAYOUT),)
    else:
        left, right = by_halves(values)
        return strips(left) + strips(right)


@gluon_jit
def rows_from(row, BLOCK_M: gl.constexpr):
    """The rows of a tile's strips."""
    return row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, STRIP_LAYOUT))


@gluon_jit
def columns_of(column, strip: gl.constexpr):
    """The columns of strip number ``strip`` of a tile."""
    return column + strip * STRIP + gl.arange(0, STRIP, gl.SliceLayout(0, STRIP_LAYOUT))


@gluon_jit
def everywhere(ctx, ptr):
    """The addresses of ``ptr`` on all ranks, the right neighbour's first, this rank's last.

    All before the first store: the load of a later one would have to wait for that. And for each tile again, since a
    product leaves no registers to keep them in.
    """
    places = ()
    for distance in gl.static_range(ctx.num_ranks):
        places += (ctx.translate(ptr, (ctx.cur_rank + distance + 1) % ctx.num_ranks),)
    return places
