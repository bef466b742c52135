"""Which rows a group has, and which tiles: from counts on the device, so that no host waits for them.

A launch has as many programs as the GPU has multiprocessors, whatever the counts are. Tiles are numbered through: those
of group 0 first, and of each group by `iris.ops.gemm.swizzle_tile`; program p computes the tiles p, p + P, p + 2 P, ...
Tiles that are computed at one time then are of few groups, and share B in the L2 cache.

Each program finds its tiles by itself. At its start it loads the rows of all groups, one vector of at most a few KiB
which the L2 cache holds, and forms the running sum of their tiles: one scan of a block. The group of a tile is how many
groups end at or before its number: one comparison and one sum of a vector, with no load after it. For 256 groups
these are two elements a thread of a block, or eight of a warp: tens of cycles beside a tile's ten thousands. A walk
from group to group instead, which a kernel for few large groups may do, is 256 dependent steps for each program where
each group has a few rows (decoding).
"""

import triton
import triton.language as tl

from iris.language.jit import jit


@jit
def rows_of(groups, group, E, room):
    """The first row of these groups, in the matrix in which they lie, and how many rows they have.

    ``groups``: a `GroupedRows`. ``room``: the rows of that matrix. A group after the last of ``E`` has none. Whatever
    the numbers are, the rows are inside of the matrix, and those of a group before those of the next one's room.
    """
    there = group < E
    first = group * 0
    end = first + room
    if groups.offs is not None:
        first = tl.load(groups.offs + group - 1, mask=there & (group > 0), other=0).to(tl.int32)
        end = tl.load(groups.offs + group, mask=there, other=0).to(tl.int32)
        first = tl.minimum(tl.maximum(first, 0), room)
        end = tl.minimum(tl.maximum(end, first), room)
    count = end - first
    if groups.counts is not None:
        given = tl.load(groups.counts + group, mask=there, other=0).to(tl.int32)
        count = tl.minimum(tl.maximum(given, 0), count)
    return first, tl.where(there, count, 0)


@triton.jit
def group_of(number, ends):
    """Which group a tile is of, and the number of that group's first tile.

    ``ends``: of each group, the number of the tile after its last.
    """
    before = ends <= number
    return tl.sum(before.to(tl.int32), axis=0), tl.max(tl.where(before, ends, 0), axis=0)
