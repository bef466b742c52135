"""Products of matrices for Hopper: wgmma, fed by TMA. Run in the simulator, compiled for sm_90.

``FORGET`` leaves out the wait or the arrival of that name.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

import iris  # noqa: F401 (kernels are defined after it)
from simulator.hopper_kernels import barriers, descriptor, load, rounded_up, store

# c = a @ b.T, one warp group ------------------------------------------------------------------------------------------


@gluon.jit
def fetch(a, b, row, column, k, loaded, tile_a, tile_b, pred):
    mbarrier.expect(loaded, a.block_type.nbytes + b.block_type.nbytes, pred=pred)
    load(a, [row, k], loaded, tile_a, pred=pred)
    load(b, [column, k], loaded, tile_b, pred=pred)


@gluon.jit
def write(c, row, column, acc, FORGET: gl.constexpr):
    result = gl.allocate_shared_memory(c.dtype, c.block_shape, c.layout)
    result.store(acc.to(c.dtype))
    fence_async_shared()
    store(c, [row, column], result)
    if FORGET != "store":
        tma.store_wait(0)


@gluon.constexpr_function
def accumulator(columns, operand):
    """The layout of a warp group's results; an instruction takes 32 bytes of a row."""
    instruction = [16, columns, 256 // operand.primitive_bitwidth]
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=instruction)


@gluon.jit
def matmul(a, b, c, K, M: gl.constexpr, N: gl.constexpr, BK: gl.constexpr, S: gl.constexpr, FORGET: gl.constexpr = ""):
    tiles_a = gl.allocate_shared_memory(a.dtype, [S, M, BK], a.layout)
    tiles_b = gl.allocate_shared_memory(b.dtype, [S, N, BK], b.layout)
    loaded = barriers(S, 1)
    row, column = gl.program_id(0) * M, gl.program_id(1) * N
    steps = gl.cdiv(K, BK)
    for i in gl.static_range(S - 1):
        fetch(a, b, row, column, i * BK, loaded.index(i), tiles_a.index(i), tiles_b.index(i), i < steps)
    acc = gl.zeros([M, N], gl.float32, accumulator(N, a.dtype))
    for i in range(steps):
        stage = i % S
        if FORGET != "load":
            mbarrier.wait(loaded.index(stage), i // S & 1)
        product = warpgroup_mma(tiles_a.index(stage), tiles_b.index(stage).permute((1, 0)), acc, is_async=True)
        # The product before this one has then read its tiles, which are overwritten next.
        acc = warpgroup_mma_wait(2 if FORGET == "product" else 1, deps=[product])
        ahead = i + S - 1
        stage = ahead % S
        fetch(
            a,
            b,
            row,
            column,
            ahead * BK,
            loaded.index(stage),
            tiles_a.index(stage),
            tiles_b.index(stage),
            ahead < steps,
        )
    if FORGET != "result":
        acc = warpgroup_mma_wait(0, deps=[acc])
    write(c, row, column, acc, FORGET)


def launch_matmul(a, b, c, blocks=(64, 64, 64), stages=3, **options):
    M, N, K = blocks
    arguments = [descriptor(a, [M, K]), descriptor(b, [N, K]), descriptor(c, [M, N]), a.shape[1], *blocks, stages]
    return matmul, (rounded_up(a.shape[0], M), rounded_up(b.shape[0], N)), arguments, options


# c = a @ b, of one tile -----------------------------------------------------------------------------------------------


@gluon.jit
def product(a, b, c, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, REGISTERS: gl.constexpr, ADDED: gl.constexpr):
    """``ADDED``: that to itself."""
    tile_a = gl.allocate_shared_memory(a.dtype, [M, K], a.layout)
    tile_b = gl.allocate_shared_memory(b.dtype, [K, N], b.layout)
    loaded = barriers(1, 2).index(0)
    mbarrier.expect(loaded, a.block_type.nbytes)
    load(a, [0, 0], loaded, tile_a)
    mbarrier.expect(loaded, b.block_type.nbytes)
    load(b, [0, 0], loaded, tile_b)
    mbarrier.wait(loaded, 0)
    layout: gl.constexpr = accumulator(N, a.dtype)
    left = tile_a
    if REGISTERS:
        left = tile_a.load(gl.DotOperandLayout(0, layout, 2))
    acc = warpgroup_mma(left, tile_b, gl.zeros([M, N], gl.float32, layout))
    again = warpgroup_mma(left, tile_b, warpgroup_mma_init(acc), use_acc=ADDED, is_async=True)
    write(c, 0, 0, warpgroup_mma_wait(deps=[again]), "")


# c = a @ b.T by partitions: one loads, two multiply half of the rows each ---------------------------------------------


@gluon.jit
def load_tiles(a, b, tiles_a, tiles_b, loaded, freed, row, column, K, FORGET: gl.constexpr):
    M: gl.constexpr = tiles_a.shape[1]
    BK: gl.constexpr = tiles_a.shape[2]
    S: gl.constexpr = tiles_b.shape[0]
    for i in range(gl.cdiv(K, BK)):
        stage = i % S
        mbarrier.wait(freed.index(stage), i // S & 1 ^ 1)
        full = loaded.index(stage)
        if FORGET != "expect":
            mbarrier.expect(full, 2 * a.block_type.nbytes + b.block_type.nbytes)
        load(a, [row, i * BK], full, tiles_a.index(2 * stage))
        load(a, [row + M, i * BK], full, tiles_a.index(2 * stage + 1))
        load(b, [column, i * BK], full, tiles_b.index(stage))


@gluon.jit
def multiply(tiles_a, tiles_b, loaded, freed, K, HALF: gl.constexpr, FORGET: gl.constexpr):
    M: gl.constexpr = tiles_a.shape[1]
    BK: gl.constexpr = tiles_a.shape[2]
    S: gl.constexpr = tiles_b.shape[0]
    N: gl.constexpr = tiles_b.shape[1]
    gl.static_assert(gl.num_warps() == 4)
    acc = gl.zeros([M, N], gl.float32, accumulator(N, tiles_a.dtype))
    for i in range(gl.cdiv(K, BK)):
        stage = i % S
        if FORGET != "load" or HALF == 0:
            mbarrier.wait(loaded.index(stage), i // S & 1)
        product = warpgroup_mma(
            tiles_a.index(2 * stage + HALF), tiles_b.index(stage).permute((1, 0)), acc, is_async=True
        )
        # Frees the tiles before they have been read.
        early: gl.constexpr = FORGET == "order" or FORGET == "order of one" and HALF == 0
        if early:
            mbarrier.arrive(freed.index(stage), count=1)
        acc = warpgroup_mma_wait(0, deps=[product])
        if not early and FORGET != "arrive" and (FORGET != "arrival of one" or HALF == 0):
            mbarrier.arrive(freed.index(stage), count=1)
    return (acc,)


@gluon.jit
def multiply_and_write(tiles_a, tiles_b, loaded, freed, c, row, column, K, FORGET: gl.constexpr):
    acc = multiply(tiles_a, tiles_b, loaded, freed, K, 1, FORGET)[0]
    write(c, row, column, acc, FORGET)


@gluon.jit
def specialized_matmul(
    a, b, c, K, M: gl.constexpr, N: gl.constexpr, BK: gl.constexpr, S: gl.constexpr, FORGET: gl.constexpr = ""
):
    tiles_a = gl.allocate_shared_memory(a.dtype, [2 * S, M, BK], a.layout)
    tiles_b = gl.allocate_shared_memory(b.dtype, [S, N, BK], b.layout)
    loaded, freed = barriers(S, 1), barriers(S, 1 if FORGET == "arrival of one" else 2)
    row, column = gl.program_id(0) * 2 * M, gl.program_id(1) * N
    acc = gl.warp_specialize(
        [
            (multiply, (tiles_a, tiles_b, loaded, freed, K, 0, FORGET)),
            (multiply_and_write, (tiles_a, tiles_b, loaded, freed, c, row + M, column, K, FORGET)),
            (load_tiles, (a, b, tiles_a, tiles_b, loaded, freed, row, column, K, FORGET)),
        ],
        [4, 1],
        [168, 24],
    )[0]
    write(c, row, column, acc, FORGET)


def launch_specialized_matmul(a, b, c, blocks=(64, 64, 64), stages=2, **options):
    _, (rows, columns), arguments, options = launch_matmul(a, b, c, blocks, stages, **options)
    return specialized_matmul, (rounded_up(rows, 2), columns), arguments, options
