"""load, store, get, put and copy in both languages and forms (``OP`` says which), tiles of matrices, and scalars."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import iris
import iris.gluon as iris_gl
from iris import DeviceContext
from iris.gluon import IrisDeviceCtx


@triton.jit
def triton_context(context_tensor, heap_bases, source, target, n, rank, peer, OP: tl.constexpr, BLOCK: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    if OP == "load":
        tl.store(target + offsets, ctx.load(source + offsets, peer, mask=mask), mask=mask)
    elif OP == "store":
        ctx.store(target + offsets, tl.load(source + offsets, mask=mask), peer, mask=mask)
    elif OP == "get":
        ctx.get(source + offsets, target + offsets, peer, mask=mask)
    elif OP == "put":
        ctx.put(source + offsets, target + offsets, peer, mask=mask)
    elif OP == "copy_from":
        ctx.copy(source + offsets, target + offsets, peer, rank, mask=mask)
    else:
        ctx.copy(source + offsets, target + offsets, rank, peer, mask=mask)


@triton.jit
def triton_functional(context_tensor, heap_bases, source, target, n, rank, peer, OP: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    if OP == "load":
        tl.store(target + offsets, iris.load(source + offsets, rank, peer, heap_bases, mask=mask), mask=mask)
    elif OP == "store":
        iris.store(target + offsets, tl.load(source + offsets, mask=mask), rank, peer, heap_bases, mask=mask)
    elif OP == "get":
        iris.get(source + offsets, target + offsets, rank, peer, heap_bases, mask=mask)
    elif OP == "put":
        iris.put(source + offsets, target + offsets, rank, peer, heap_bases, mask=mask)
    elif OP == "copy_from":
        iris.copy(source + offsets, target + offsets, peer, rank, rank, heap_bases, mask=mask)
    else:
        iris.copy(source + offsets, target + offsets, rank, peer, rank, heap_bases, mask=mask)


@gluon.jit
def gluon_context(context_tensor, heap_bases, source, target, n, rank, peer, OP: gl.constexpr, BLOCK: gl.constexpr):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    layout: gl.constexpr = gl.BlockedLayout([2], [iris_gl.threads_per_warp()], [gl.num_warps()], [0])
    offsets = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout=layout)
    mask = offsets < n
    if OP == "load":
        gl.store(target + offsets, ctx.load(source + offsets, peer, mask=mask), mask=mask)
    elif OP == "store":
        ctx.store(target + offsets, gl.load(source + offsets, mask=mask), peer, mask=mask)
    elif OP == "get":
        ctx.get(source + offsets, target + offsets, peer, mask=mask)
    elif OP == "put":
        ctx.put(source + offsets, target + offsets, peer, mask=mask)
    elif OP == "copy_from":
        ctx.copy(source + offsets, target + offsets, peer, rank, mask=mask)
    else:
        ctx.copy(source + offsets, target + offsets, rank, peer, mask=mask)


@gluon.jit
def gluon_functional(context_tensor, heap_bases, source, target, n, rank, peer, OP: gl.constexpr, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([2], [iris_gl.threads_per_warp()], [gl.num_warps()], [0])
    offsets = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout=layout)
    mask = offsets < n
    if OP == "load":
        gl.store(target + offsets, iris_gl.load(source + offsets, rank, peer, heap_bases, mask=mask), mask=mask)
    elif OP == "store":
        iris_gl.store(target + offsets, gl.load(source + offsets, mask=mask), rank, peer, heap_bases, mask=mask)
    elif OP == "get":
        iris_gl.get(source + offsets, target + offsets, rank, peer, heap_bases, mask=mask)
    elif OP == "put":
        iris_gl.put(source + offsets, target + offsets, rank, peer, heap_bases, mask=mask)
    elif OP == "copy_from":
        iris_gl.copy(source + offsets, target + offsets, peer, rank, rank, heap_bases, mask=mask)
    else:
        iris_gl.copy(source + offsets, target + offsets, rank, peer, rank, heap_bases, mask=mask)


@triton.jit
def triton_tile(context_tensor, source, target, M, N, stride, peer, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Stores a block of a matrix into the transposed place of the peer's, so rows and columns cannot be mixed up."""
    ctx = DeviceContext.initialize(context_tensor)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows[:, None] < M) & (columns[None, :] < N)
    tile = tl.load(source + rows[:, None] * stride + columns[None, :], mask=mask)
    ctx.store(target + columns[None, :] * M + rows[:, None], tile, peer, mask=mask)


@gluon.jit
def gluon_tile(context_tensor, source, target, M, N, stride, peer, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    threads: gl.constexpr = iris_gl.threads_per_warp()
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [threads // 8, 8], [gl.num_warps(), 1], [1, 0])
    rows = gl.program_id(0) * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout))
    columns = gl.program_id(1) * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
    row, column = gl.expand_dims(rows, 1), gl.expand_dims(columns, 0)
    mask = (row < M) & (column < N)
    tile = gl.load(source + row * stride + column, mask=mask)
    ctx.store(target + column * M + row, tile, peer, mask=mask)


@triton.jit
def triton_scalar(context_tensor, source, target, peer):
    ctx = DeviceContext.initialize(context_tensor)
    ctx.store(target + tl.program_id(0), ctx.load(source + tl.program_id(0), peer), peer)


@gluon.jit
def gluon_scalar(context_tensor, source, target, peer):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    ctx.store(target + gl.program_id(0), ctx.load(source + gl.program_id(0), peer), peer)


@triton.jit
def triton_options(context_tensor, heap_bases, source, target, n, rank, peer, OP: tl.constexpr, BLOCK: tl.constexpr):
    """The optional arguments: what stands in for masked elements, cache modifiers, volatile, a hint."""
    ctx = DeviceContext.initialize(context_tensor, rank)
    o = tl.arange(0, BLOCK)
    inside = o < n
    if OP == "other":
        tl.store(target + o, ctx.load(source + o, peer, mask=inside, other=-7))
    elif OP == "get other":
        ctx.get(source + o, target + o, peer, mask=inside, other=-7)
    elif OP == "cache":
        value = ctx.load(source + o, peer, inside, -7, ".cg")
        ctx.store(target + o, value, rank, cache_modifier=".wt")
    elif OP == "volatile":
        tl.store(target + o, ctx.load(source + o, peer, inside, -7, volatile=True))
    elif OP == "functional":
        value = iris.load(source + o, rank, peer, heap_bases, inside, -7, ".cg", False, 16)
        iris.store(target + o, value, rank, rank, heap_bases, None, 16, ".wt")
    else:
        iris.get(source + o, target + o, rank, peer, heap_bases, inside, -7, ".cg", ".wt", 16)


@gluon.jit
def gluon_options(context_tensor, heap_bases, source, target, n, rank, peer, OP: gl.constexpr, BLOCK: gl.constexpr):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    o = gl.arange(0, BLOCK, layout=gl.BlockedLayout([4], [iris_gl.threads_per_warp()], [gl.num_warps()], [0]))
    inside = o < n
    if OP == "other":
        gl.store(target + o, ctx.load(source + o, peer, mask=inside, other=-7))
    elif OP == "get other":
        ctx.get(source + o, target + o, peer, mask=inside, other=-7)
    elif OP == "cache":
        value = ctx.load(source + o, peer, inside, -7, ".cg")
        ctx.store(target + o, value, rank, cache_modifier=".wt")
    elif OP == "volatile":
        gl.store(target + o, ctx.load(source + o, peer, inside, -7, volatile=True))
    elif OP == "functional":
        value = iris_gl.load(source + o, rank, peer, heap_bases, inside, -7, ".cg", False, 16)
        iris_gl.store(target + o, value, rank, rank, heap_bases, None, 16, ".wt")
    else:
        iris_gl.get(source + o, target + o, rank, peer, heap_bases, inside, -7, ".cg", ".wt", 16)


@triton.jit
def triton_translated(context_tensor, target, value, peer):
    ctx = DeviceContext.initialize(context_tensor)
    tl.store(ctx.translate(target, peer), value)


@gluon.jit
def gluon_translated(context_tensor, target, value, peer):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    gl.store(ctx.translate(target, peer), value)
