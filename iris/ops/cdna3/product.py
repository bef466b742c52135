"""The product of matrices, tile by tile, which the kernels of this folder share.

Compiled for gfx942 (CDNA3) and gfx950 (CDNA4) and run in the simulator; never run on an AMD GPU.

A program is eight wavefronts, two for each SIMD of a compute unit, and computes one tile of BLOCK_M x BLOCK_N after the
other in steps of BLOCK_K. What a step multiplies is in shared memory, and what the next one will is on its way into
registers meanwhile: these are the two buffers, so that shared memory has to hold only one (64 KiB on CDNA3).

    write x, y to shared memory  →  barrier  →  begin to load the next x, y  →  multiply  →  barrier

The barriers are the compiler's: it puts one between accesses of shared memory by different threads.

Steps go on over the edge of a tile: the last one of a tile begins to load what the next tile needs first. So nothing
waits between tiles; and these loads come before what the program then stores to peers. A wavefront counts its
loads and stores together and in order (vmcnt; AMD Instinct MI300 ISA, "S_WAITCNT"), so loads after the stores would be
waited for until all of them had arrived over the link.

A and B are the same here: lines, each of K elements, which are rows of A and columns of B. In shared memory lines lie
one after the other, since a lane of the matrix core takes 8 elements of one line, 16 bytes. Where neighbours in global
memory are of different lines instead, each thread loads a few elements of 8 lines, and turns them in its registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna3

from iris import simulator
from iris.language.jit import gluon_jit
from iris.ops.kernel_arguments import Matrix, TilePlace

WARPS = gl.constexpr(8)
# Elements of 16 bytes, which is the most that a lane moves at once: the kernels are for types of 2 bytes.
VECTOR = gl.constexpr(8)
# Elements of the lines that are in registers at a time: the 16 bytes of each lane. All of a step's would be too many.
DEPTH = gl.constexpr(32)


@gluon.constexpr_function
def accumulator(rows, columns):
    """The layout of the products. Each lane has 4 neighbours of a row: ``transposed``."""
    from triton.runtime import driver

    newer = not simulator.ACTIVE and driver.active.get_current_target().arch == "gfx950"
    warps = [4, 2] if rows > columns else [2, 4]
    return gl.amd.AMDMFMALayout(4 if newer else 3, [16, 16, 32 if newer else 16], True, warps)


@gluon.constexpr_function
def on_the_way(lines, depth, by_lines):
    """The layout of a tile in registers: neighbours in global memory with one thread, and with its neighbours.

    ``by_lines``: elements of a line are neighbours; else the same elements of all lines.
    """
    if by_lines:
        lanes = depth // VECTOR
        return gl.BlockedLayout([1, VECTOR.value], [64 // lanes, lanes], [WARPS.value, 1], [1, 0])
    lanes = min(64, lines // VECTOR)
    warps = max(1, lines // (VECTOR * lanes))
    each = min(VECTOR.value, lines * depth // (64 * WARPS * VECTOR))
    return gl.BlockedLayout([VECTOR.value, each], [lanes, 64 // lanes], [warps, WARPS // warps], [0, 1])


@gluon.constexpr_function
def in_shared_memory(depth):
    """Lines of 16-byte words, exchanged such that 8 lanes with a word of 8 lines each meet in no bank.

    The banks are 128 bytes wide.
    """
    words = depth // VECTOR
    return gl.SwizzledSharedLayout(VECTOR.value, max(1, 8 // words), min(8, words), [1, 0])


@gluon_jit
def packed(tile):
    """Neighbours of two lines in one word of 32 bits, as they were loaded: nothing is computed.

    For the way through the loop. Each element of 16 bits would have a register of 32 of its own there, and what is
    loaded be waited for, to take it apart.
    """
    pairs = tile.reshape([tile.shape[0] // 2, 2, tile.shape[1]]).permute((0, 2, 1)).to(gl.uint16, bitcast=True)
    low, high = pairs.split()
    return low.to(gl.uint32) | high.to(gl.uint32) << 16


@gluon_jit
def unpacked(words, element: gl.constexpr):
    """What was `packed`."""
    pairs = gl.join(words.to(gl.uint16), (words >> 16).to(gl.uint16)).to(element, bitcast=True)
    return pairs.permute((0, 2, 1)).reshape([2 * words.shape[0], words.shape[1]])


@gluon_jit
def leave(tile, values, BY_LINES: gl.constexpr):
    """Store to shared memory what `fetch` returned."""
    if BY_LINES:
        tile.store(values)
    else:
        values = unpacked(values, tile.dtype)
        tile.store(gl.convert_layout(values, on_the_way(tile.shape[0], tile.shape[1], False), assert_trivial=True))


@gluon_jit
def fetch(
    matrix,
    line,
    lines,
    k,
    K,
    stride_line,
    stride_k,
    LINES: gl.constexpr,
    BLOCK_K: gl.constexpr,
    BY_LINES: gl.constexpr,
):
    """Begin to load LINES lines from ``line`` on, elements from ``k`` on: zeros past ``lines`` and ``K``.

    The place of the tile is a scalar of 64 bits; the offsets in it have 32, as those of buffer loads do. What is masked
    off is out of a buffer's range, and read as zeros (AMD Instinct MI300 ISA, "Range checking"). To say so would cost a
    selection, for which the loads would be waited for here.
    """
    layout: gl.constexpr = on_the_way(LINES, BLOCK_K, BY_LINES)
    i = gl.arange(0, LINES, gl.SliceLayout(1, layout))
    j = gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout))
    tile = matrix + (gl.cast(line, gl.int64) * stride_line + gl.cast(k, gl.int64) * stride_k)
    inside = (i < lines - line)[:, None] & (j < K - k)[None, :]
    values = cdna3.buffer_load(tile, i[:, None] * stride_line + j[None, :] * stride_k, mask=inside)
    return values if BY_LINES else packed(values)


@gluon_jit
def fetch_both(a, b, place, k, N, K, TILING: gl.constexpr):
    """What a step multiplies: rows of A and columns of B from ``place`` on, a `TilePlace`."""
    x = fetch(
        a.ptr,
        line=place.row,
        lines=place.stop,
        k=k,
        K=K,
        stride_line=a.row_stride,
        stride_k=a.column_stride,
        LINES=TILING.BLOCK_M,
        BLOCK_K=TILING.BLOCK_K,
        BY_LINES=TILING.BY_LINES_A,
    )
    y = fetch(
        b.ptr,
        line=place.column,
        lines=N,
        k=k,
        K=K,
        stride_line=b.column_stride,
        stride_k=b.row_stride,
        LINES=TILING.BLOCK_N,
        BLOCK_K=TILING.BLOCK_K,
        BY_LINES=TILING.BY_LINES_B,
    )
    return x, y


@gluon_jit
def product(x, y, a, b, place, next_a, following, N, K, TILING: gl.constexpr):
    """The tile at ``place``, in float32; and the first x and y of the ``following`` one, which are on their way.

    ``x``, ``y``: this one's. Past where a tile's rows end there are zeros. ``next_a``: where the rows of the
    following one are.
    """
    BLOCK_M: gl.constexpr = TILING.BLOCK_M
    BLOCK_N: gl.constexpr = TILING.BLOCK_N
    BLOCK_K: gl.constexpr = TILING.BLOCK_K
    layout: gl.constexpr = accumulator(BLOCK_M, BLOCK_N)
    shared: gl.constexpr = in_shared_memory(BLOCK_K)
    # Made for each tile: what moves the products between threads afterwards has the same memory.
    left = gl.allocate_shared_memory(a.ptr.dtype.element_ty, [BLOCK_M, BLOCK_K], shared)
    right = gl.allocate_shared_memory(b.ptr.dtype.element_ty, [BLOCK_N, BLOCK_K], shared)
    total = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout)
    for k in range(0, K, BLOCK_K):
        leave(left, x, TILING.BY_LINES_A)
        leave(right, y, TILING.BY_LINES_B)
        last = k + BLOCK_K >= K
        there = Matrix(gl.where(last, next_a, a.ptr), a.row_stride, a.column_stride)
        row, column = gl.where(last, following.row, place.row), gl.where(last, following.column, place.column)
        next_k, stop = gl.where(last, 0, k + BLOCK_K), gl.where(last, following.stop, place.stop)
        x, y = fetch_both(there, b, TilePlace(row, column, stop), next_k, N=N, K=K, TILING=TILING)
        for part in gl.static_range(BLOCK_K // DEPTH):
            u = left.slice(part * DEPTH, DEPTH, 1).load(gl.DotOperandLayout(0, layout, VECTOR))
            v = right.slice(part * DEPTH, DEPTH, 1).permute((1, 0)).load(gl.DotOperandLayout(1, layout, VECTOR))
            total = cdna3.mfma(u, v, total)
    return total, x, y
