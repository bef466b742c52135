"""Kernels with what Hopper has: TMA, mbarriers, partitions of warps. Run in the simulator, compiled for sm_90.

``FORGET`` leaves out the wait or the arrival of that name.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import iris  # noqa: F401 (kernels are defined after it)

# Triton 3.6's names are other than 3.9's.
load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
add, largest = getattr(tma, "async_atomic_add", None), getattr(tma, "async_atomic_max", None)  # 3.6 has none
fetch_line = getattr(async_copy, "async_load", async_copy.async_copy_global_to_shared)
block_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

GLUON = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float8_e4m3fn: gl.float8e4nv}
GLUON |= {torch.float8_e5m2: gl.float8e5, torch.float32: gl.float32, torch.int32: gl.int32}


def descriptor(tensor, block):
    return TensorDescriptor.from_tensor(tensor, block, gl.NVMMASharedLayout.get_default_for(block, GLUON[tensor.dtype]))


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


def rounded_up(size, block):
    return -(-size // block)


TILE = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


# A few operations of each kind ----------------------------------------------------------------------------------------


@gluon.jit
def read_block(source, out, row, column, R: gl.constexpr, C: gl.constexpr):
    block = gl.allocate_shared_memory(source.dtype, [R, C], source.layout)
    loaded = barriers(1, 1).index(0)
    mbarrier.expect(loaded, source.block_type.nbytes)
    load(source, [row, column], loaded, block)
    mbarrier.wait(loaded, 0)
    rows, columns = gl.arange(0, R, gl.SliceLayout(1, TILE)), gl.arange(0, C, gl.SliceLayout(0, TILE))
    gl.store(out + rows[:, None] * C + columns[None, :], block.load(TILE))


@gluon.jit
def read_block_of(pointer, out, rows, columns, row, column, R: gl.constexpr, C: gl.constexpr):
    """With a descriptor that the kernel makes."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([R, C], pointer.dtype.element_ty)
    source = tma.make_tensor_descriptor(pointer, [rows, columns], [columns, 1], [R, C], layout)
    read_block(source, out, row, column, R, C)


@gluon.jit
def write_block(target, first, out, row, column, R: gl.constexpr, C: gl.constexpr, HOW: gl.constexpr):
    """``out``: what ``first``, an element of the target, is when the store has been waited for."""
    block = gl.allocate_shared_memory(target.dtype, [R, C], target.layout, gl.full([R, C], 5, target.dtype, TILE))
    fence_async_shared()
    if HOW == "add":
        add(target, [row, column], block)
    elif HOW == "max":
        largest(target, [row, column], block)
    else:
        store(target, [row, column], block)
    if HOW == "visible":
        tma.store_wait(0, read_only=False)
    else:
        tma.store_wait(0)
    gl.store(out, gl.load(first))


@gluon.jit
def write_twice(source, out, R: gl.constexpr, C: gl.constexpr, SECOND: gl.constexpr, FORGET: gl.constexpr = ""):
    """A block loaded, and then another one, or fives, in its place."""
    block = gl.allocate_shared_memory(source.dtype, [R, C], source.layout)
    loaded = barriers(2, 1)
    mbarrier.expect(loaded.index(0), source.block_type.nbytes)
    load(source, [0, 0], loaded.index(0), block)
    if FORGET != "wait":
        mbarrier.wait(loaded.index(0), 0)
    if SECOND == "store":
        block.store(gl.full([R, C], 5, source.dtype, TILE))
    else:
        fence_async_shared()
        mbarrier.expect(loaded.index(1), source.block_type.nbytes)
        load(source, [R, 0], loaded.index(1), block)
    if FORGET == "wait":
        mbarrier.wait(loaded.index(0), 0)
    if SECOND != "store":
        mbarrier.wait(loaded.index(1), 0)
    rows, columns = gl.arange(0, R, gl.SliceLayout(1, TILE)), gl.arange(0, C, gl.SliceLayout(0, TILE))
    gl.store(out + rows[:, None] * C + columns[None, :], block.load(TILE))


@gluon.jit
def phases(out, ARRIVALS: gl.constexpr, FORGET: gl.constexpr = ""):
    barrier = barriers(1, ARRIVALS).index(0)
    mbarrier.wait(barrier, 1)  # for the phase before the first
    mbarrier.arrive(barrier, count=1)
    mbarrier.arrive(barrier, count=1, pred=FORGET != "arrive")
    mbarrier.wait(barrier, 0)
    mbarrier.arrive(barrier, count=1)
    mbarrier.expect(barrier, 64, pred=FORGET == "bytes")
    mbarrier.arrive(barrier, count=1, pred=FORGET != "bytes")
    mbarrier.wait(barrier, 1)
    mbarrier.wait(barrier, 0, pred=False)
    mbarrier.invalidate(barrier)
    gl.store(out, 1)


@gluon.jit
def misused(HOW: gl.constexpr):
    barrier = barriers(1, 2).index(0)
    if HOW == "early":
        mbarrier.arrive(gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()), count=1)
    if HOW == "often":
        mbarrier.arrive(barrier, count=3)
    if HOW == "phase":
        mbarrier.wait(barrier, 2)
    if HOW == "late":
        mbarrier.invalidate(barrier)
        mbarrier.arrive(barrier, count=1)


@gluon.jit
def name_beside(out, first, HOW: gl.constexpr):
    """What lies at ``first``, of two lines and barriers: named, and used if ``HOW`` says so."""
    lines = gl.allocate_shared_memory(gl.float32, [2, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    barrier, line = barriers(2, 1).index(first), lines.index(first)
    mbarrier.arrive(barrier, count=1, pred=HOW == "arrive")
    if HOW == "load":
        gl.store(out + gl.arange(0, 128, LINE), line.load(LINE))
    if HOW == "slice":
        lines.index(0).slice(100, 64)
    if HOW == "of all dimensions":
        gl.allocate_shared_memory(gl.float32, [2, 128], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).index(first)


@gluon.jit
def copy_by_threads(source, out, n, BLOCK: gl.constexpr, BARRIER: gl.constexpr, FORGET: gl.constexpr = ""):
    buffers = gl.allocate_shared_memory(gl.float32, [2, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    copied = barriers(2, 1)
    offsets = gl.arange(0, BLOCK, LINE)
    fetch_line(buffers.index(0), source + offsets, offsets < n)
    async_copy.commit_group()
    for i in range(gl.cdiv(n, BLOCK)):
        buffer, barrier = buffers.index(i % 2), copied.index(i % 2)
        if BARRIER:
            async_copy.mbarrier_arrive(barrier)
            mbarrier.arrive(barrier, count=1)
        ahead = (i + 1) * BLOCK + offsets
        fetch_line(buffers.index((i + 1) % 2), source + ahead, ahead < n)
        async_copy.commit_group()
        if BARRIER:
            mbarrier.wait(barrier, i // 2 & 1)
        else:
            async_copy.wait_group(2 if FORGET == "copy" else 1)
        block_barrier()
        gl.store(out + i * BLOCK + offsets, buffer.load(LINE))
    async_copy.wait_group(0)


# A copy, block by block of a row of blocks, through two buffers -------------------------------------------------------


@gluon.jit
def copy(source, target, columns, ROWS: gl.constexpr, COLUMNS: gl.constexpr, FORGET: gl.constexpr = ""):
    buffers = gl.allocate_shared_memory(source.dtype, [2] + source.block_type.shape, source.layout)
    loaded = barriers(2, 1)
    row = gl.program_id(0) * ROWS
    blocks = gl.cdiv(columns, COLUMNS)
    for first in gl.static_range(2):
        mbarrier.expect(loaded.index(first), source.block_type.nbytes)
        load(source, [row, first * COLUMNS], loaded.index(first), buffers.index(first))
    for i in range(blocks):
        buffer, full = buffers.index(i % 2), loaded.index(i % 2)
        if FORGET != "load":
            mbarrier.wait(full, i // 2 & 1)
        store(target, [row, i * COLUMNS], buffer)
        if FORGET != "store":
            tma.store_wait(0)
        more = i + 2 < blocks
        mbarrier.expect(full, source.block_type.nbytes, pred=more)
        load(source, [row, (i + 2) * COLUMNS], full, buffer, pred=more)
    tma.store_wait(0)


def launch_copy(source, target, block=(32, 64), **options):
    """The kernel, its grid, its arguments and its options."""
    descriptors = [descriptor(tensor, list(block)) for tensor in (source, target)]
    return copy, (rounded_up(source.shape[0], block[0]),), [*descriptors, source.shape[1], *block], options


# A block that one partition hands to another --------------------------------------------------------------------------


@gluon.jit
def put(block, is_there, FENCE: gl.constexpr):
    block.store(gl.full(block.shape, 5, block.dtype, TILE))
    if FENCE == "writer":
        fence_async_shared()
    mbarrier.arrive(is_there, count=1)


@gluon.jit
def take(block, is_there, out, FORGET: gl.constexpr):
    if FORGET != "wait":
        mbarrier.wait(is_there, 0)
    rows, columns = gl.arange(0, 32, gl.SliceLayout(1, TILE)), gl.arange(0, 32, gl.SliceLayout(0, TILE))
    gl.store(out + rows[:, None] * 32 + columns[None, :], block.load(TILE))


@gluon.jit
def hand_over(out, FORGET: gl.constexpr = ""):
    """One partition stores a block, another stores it to ``out``."""
    block = gl.allocate_shared_memory(gl.float32, [32, 32], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    is_there = barriers(1, 1).index(0)
    gl.warp_specialize([(put, (block, is_there, "")), (take, (block, is_there, out, FORGET))], [4], [24])


@gluon.jit
def send(block, is_there, target, FENCE: gl.constexpr):
    mbarrier.wait(is_there, 0)
    if FENCE == "reader":
        fence_async_shared()
    store(target, [0, 0], block)
    tma.store_wait(0)


@gluon.jit
def hand_to_tma(target, FENCE: gl.constexpr):
    block = gl.allocate_shared_memory(target.dtype, target.block_type.shape, target.layout)
    is_there = barriers(1, 1).index(0)
    gl.warp_specialize([(put, (block, is_there, FENCE)), (send, (block, is_there, target, FENCE))], [4], [24])
