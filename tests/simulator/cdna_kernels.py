"""Products with AMD's matrix cores. Run in the simulator, compiled for gfx942 and gfx950."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna3, cdna4
from triton.experimental.gluon.language.amd.cdna4 import async_copy

import iris  # noqa: F401 (kernels are defined after it)

SHARED = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.constexpr_function
def vectors(element):
    """A thread takes the 16 bytes that a load to shared memory moves."""
    length = 128 // element.primitive_bitwidth
    return gl.BlockedLayout([1, length], [length, 64 // length], [4, 1], [1, 0])


@gluon.jit
def places(tile, row, k, rows, K):
    """Offsets of a tile in a matrix of ``rows`` rows, and which of them are in it."""
    layout: gl.constexpr = vectors(tile.dtype)
    i = (row + gl.arange(0, tile.shape[0], gl.SliceLayout(1, layout)))[:, None]
    j = (k + gl.arange(0, tile.shape[1], gl.SliceLayout(0, layout)))[None, :]
    return i * K + j, (i < rows) & (j < K)


@gluon.jit
def through_registers(tile, matrix, row, k, rows, K):
    offsets, inside = places(tile, row, k, rows, K)
    tile.store(cdna3.buffer_load(matrix, offsets, mask=inside, other=0.0))


@gluon.jit
def directly(tile, matrix, row, k, rows, K):
    offsets, inside = places(tile, row, k, rows, K)
    async_copy.buffer_load_to_shared(tile, matrix, offsets, mask=inside, other=0.0)


@gluon.jit
def matmul(
    a, b, c, M, N, K, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, VERSION: gl.constexpr,
    DIRECT: gl.constexpr, FORGET: gl.constexpr = "",
):  # fmt: skip
    """c = a @ b.T, through two buffers; ``DIRECT``: loads to shared memory that are waited for, which gfx950 has."""
    depth: gl.constexpr = 8 if VERSION == 3 and a.dtype.element_ty.primitive_bitwidth == 16 else 16
    products: gl.constexpr = gl.amd.AMDMFMALayout(VERSION, [32, 32, depth], True, [2, 2])
    tiles_a = gl.allocate_shared_memory(a.dtype.element_ty, [2, BM, BK], SHARED)
    tiles_b = gl.allocate_shared_memory(b.dtype.element_ty, [2, BN, BK], SHARED)
    row, column = gl.program_id(0) * BM, gl.program_id(1) * BN
    acc = gl.zeros([BM, BN], gl.float32, products)
    fetch: gl.constexpr = directly if DIRECT else through_registers
    fetch(tiles_a.index(0), a, row, 0, M, K)
    fetch(tiles_b.index(0), b, column, 0, N, K)
    if DIRECT:
        async_copy.commit_group()
    for i in range(gl.cdiv(K, BK)):
        # Past the end the masks are off everywhere.
        fetch(tiles_a.index((i + 1) % 2), a, row, (i + 1) * BK, M, K)
        fetch(tiles_b.index((i + 1) % 2), b, column, (i + 1) * BK, N, K)
        if DIRECT:
            async_copy.commit_group()
            async_copy.wait_group(2 if FORGET == "copy" else 1)
        left = tiles_a.index(i % 2).load(gl.DotOperandLayout(0, products, depth // 2))
        right = tiles_b.index(i % 2).permute([1, 0]).load(gl.DotOperandLayout(1, products, depth // 2))
        acc = cdna3.mfma(left, right, acc)
    if DIRECT:
        async_copy.wait_group(0)
    rows = (row + gl.arange(0, BM, gl.SliceLayout(1, products)))[:, None]
    columns = (column + gl.arange(0, BN, gl.SliceLayout(0, products)))[None, :]
    result = acc.to(c.dtype.element_ty)
    cdna3.buffer_store(result, c, rows * N + columns, mask=(rows < M) & (columns < N))


def launch_matmul(a, b, c, version, direct, blocks=(64, 64, 64), **options):
    """The kernel, its grid, its arguments and its options."""
    grid = tuple(-(-size // block) for size, block in zip(c.shape, blocks, strict=False))
    return matmul, grid, [a, b, c, *c.shape, a.shape[1], *blocks, version, direct], options


@gluon.jit
def load_past_the_end(x, out, n, BLOCK: gl.constexpr):
    i = gl.arange(0, BLOCK, gl.BlockedLayout([4], [64], [4], [0]))
    cdna3.buffer_store(cdna3.buffer_load(x, i, mask=i < n), out, i)


@gluon.jit
def copy_past_registers(x, out, n, BLOCK: gl.constexpr, FORGET: gl.constexpr = False, OTHER: gl.constexpr = 0.0):
    """Through shared memory, by loads from global memory whose addresses are pointers: gfx950 has them of 16 bytes."""
    layout: gl.constexpr = gl.BlockedLayout([4], [64], [4], [0])
    i = gl.arange(0, BLOCK, layout)
    tile = gl.allocate_shared_memory(x.dtype.element_ty, [BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tile.store(gl.full([BLOCK], 3, x.dtype.element_ty, layout))
    async_copy.global_load_to_shared(tile, x + i, mask=i < n, other=OTHER)
    async_copy.commit_group()
    if not FORGET:
        async_copy.wait_group(0)
    gl.store(out + i, tile.load(layout))


@gluon.jit
def load_matrix(pointer, R: gl.constexpr, C: gl.constexpr, LAYOUT: gl.constexpr):
    rows, columns = gl.arange(0, R, gl.SliceLayout(1, LAYOUT)), gl.arange(0, C, gl.SliceLayout(0, LAYOUT))
    return gl.load(pointer + rows[:, None] * C + columns[None, :])


@gluon.jit
def mfma_scaled(
    a, factors_a, b, factors_b, out, A: gl.constexpr, B: gl.constexpr, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr
):
    """out = a @ b + 1 in the formats ``A`` and ``B``; gfx950 has it. Factors: of 32 numbers along K, or None."""
    products: gl.constexpr = gl.amd.AMDMFMALayout(4, [32, 32, 64], True, [2, 1])
    left: gl.constexpr = gl.DotOperandLayout(0, products, 16)
    right: gl.constexpr = gl.DotOperandLayout(1, products, 16)
    of_left = None
    if factors_a is not None:
        of_left = load_matrix(factors_a, M, K // 32, cdna4.get_mfma_scale_layout(left, [M, K // 32]))
    of_right = None
    if factors_b is not None:
        of_right = load_matrix(factors_b, N, K // 32, cdna4.get_mfma_scale_layout(right, [N, K // 32]))
    tile_a = load_matrix(a, M, K // 2 if A == "e2m1" else K, left)
    tile_b = load_matrix(b, K // 2 if B == "e2m1" else K, N, right)
    acc = gl.full([M, N], 1, gl.float32, products)
    acc = cdna4.mfma_scaled(tile_a, of_left, A, tile_b, of_right, B, acc)
    rows, columns = gl.arange(0, M, gl.SliceLayout(1, products)), gl.arange(0, N, gl.SliceLayout(0, products))
    gl.store(out + rows[:, None] * N + columns[None, :], acc)


@gluon.jit
def lower_half(x, out):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 8], [4, 1], [1, 0])
    tile = load_matrix(x, 64, 32, layout)
    gl.amd.hint.sched_barrier()
    half = gl.amd.slice(tile, [32, 32], [32, 0])
    rows, columns = gl.arange(0, 32, gl.SliceLayout(1, layout)), gl.arange(0, 32, gl.SliceLayout(0, layout))
    gl.store(out + rows[:, None] * 32 + columns[None, :], half)
