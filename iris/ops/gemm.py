"""The product of one tile, and the order of tiles: what every fused kernel has of a GEMM."""

import triton
import triton.language as tl
from triton.experimental import gluon

from iris.language.jit import jit
from iris.language.target import on_nvidia


@triton.constexpr_function
def precision(allow_tf32):
    """Of products of float32. Not all of AMD's have TF32, and for narrower types it does not matter."""
    return "tf32" if allow_tf32 and on_nvidia() else "ieee"


@jit
def swizzle_tile(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Row and column of tile number ``tile``: GROUP rows of tiles, one column after the other, then the next rows.

    What programs compute at one time then shares rows of A and columns of B, which the L2 cache holds.
    """
    in_group = GROUP * tiles_n
    first = tile // in_group * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    return first + tile % in_group % height, tile % in_group // height


@triton.jit
def product(a, b, rows, columns, stop_m, N, K, TILING: tl.constexpr, total=None):
    """Rows of A below ``stop_m`` times columns of B below N, in float32; zeros beyond these. Added to ``total``.

    ``a``, ``b``: each a `Matrix`. ``TILING``: a `Tiling`. ``rows`` and ``columns`` are consecutive numbers. At the edge
    they are masked and not clamped: of clamped ones the compiler would load every element by itself.
    """
    BLOCK_K: tl.constexpr = TILING.BLOCK_K
    k = tl.arange(0, BLOCK_K)
    x = a.ptr + (rows.to(tl.int64)[:, None] * a.row_stride + k.to(tl.int64)[None, :] * a.column_stride)
    y = b.ptr + (k.to(tl.int64)[:, None] * b.row_stride + columns.to(tl.int64)[None, :] * b.column_stride)
    step_a, step_b = tl.cast(a.column_stride, tl.int64) * BLOCK_K, tl.cast(b.row_stride, tl.int64) * BLOCK_K
    inside_m, inside_n = (rows < stop_m)[:, None], (columns < N)[None, :]
    if total is None:
        total = tl.zeros((rows.shape[0], columns.shape[0]), dtype=tl.float32)
    for begin in range(0, K, BLOCK_K):
        here = k < K - begin
        left = tl.load(x, mask=inside_m & here[None, :], other=0.0, cache_modifier=TILING.CACHE_A)
        right = tl.load(y, mask=here[:, None] & inside_n, other=0.0, cache_modifier=TILING.CACHE_B)
        # Hopper's tensor cores add up products of fp8 with fewer bits than float32 has: let them do so for one step.
        rounding: tl.constexpr = precision(TILING.ALLOW_TF32)
        total = tl.dot(left, right, total, input_precision=rounding, max_num_imprecise_acc=BLOCK_K)
        x += step_a
        y += step_b
    return total


@triton.jit
def scaled(total, epilogue, rows, columns, stop_m, N):
    """``total`` times the scale factors of A's rows and B's columns, if there are any."""
    if epilogue.scale_a is not None:
        of_rows = tl.load(epilogue.scale_a + rows, mask=rows < stop_m, other=0)
        return total * of_rows[:, None] * tl.load(epilogue.scale_b + columns, mask=columns < N, other=0)[None, :]
    else:
        return total


@triton.jit
def biased(total, epilogue, columns, N):
    """``total`` plus the bias of each column, if there is one."""
    if epilogue.bias is not None:
        return total + tl.load(epilogue.bias + columns, mask=columns < N, other=0)[None, :].to(tl.float32)
    else:
        return total


@jit
def remap_xcd(program, programs, XCDS: tl.constexpr, CHUNK: tl.constexpr):
    """A new number for this program, such that programs of CHUNK consecutive numbers are on one chiplet.

    The hardware deals programs out to the XCDS chiplets of an MI300 one by one, and each chiplet has an L2 cache of
    its own (AMD CDNA 3 architecture, white paper: XCDs). Programs after the last full round keep their number.
    """
    turn: tl.constexpr = XCDS * CHUNK
    chiplet, number = program % XCDS, program // XCDS
    moved = number // CHUNK * turn + chiplet * CHUNK + number % CHUNK
    return tl.where(program < programs // turn * turn, moved, program)


@gluon.jit
def by_halves(x):
    """The left and the right half of a block's columns. No data move between threads."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()
