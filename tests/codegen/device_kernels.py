"""Kernels whose generated code the checks read: one remote access each, in both languages and every shape of access."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import iris
import iris.gluon as iris_gl
from iris import DeviceContext
from iris.gluon import IrisDeviceCtx
from iris.language.ll_poll import ll_recv_shared


@triton.jit
def triton_1d(context_tensor, source, target, n, to_rank, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if MASKED:
        ctx.store(target + offsets, ctx.load(source + offsets, to_rank, mask=offsets < n), to_rank, mask=offsets < n)
    else:
        ctx.store(target + offsets, ctx.load(source + offsets, to_rank), to_rank)


@triton.jit
def triton_2d(context_tensor, source, target, n, to_rank, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    rows = tl.program_id(0) * 16 + tl.arange(0, 16)
    columns = tl.arange(0, BLOCK // 16)
    offsets = rows[:, None] * n + columns[None, :]
    mask = columns[None, :] < n
    if MASKED:
        ctx.store(target + offsets, ctx.load(source + offsets, to_rank, mask=mask), to_rank, mask=mask)
    else:
        ctx.store(target + offsets, ctx.load(source + offsets, to_rank), to_rank)


@triton.jit
def triton_functional(heap_bases, source, target, n, to_rank, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if MASKED:
        mask = offsets < n
        value = iris.load(source + offsets, 0, to_rank, heap_bases, mask=mask)
        iris.store(target + offsets, value, 0, to_rank, heap_bases, mask=mask)
    else:
        iris.store(target + offsets, iris.load(source + offsets, 0, to_rank, heap_bases), 0, to_rank, heap_bases)


@gluon.jit
def gluon_1d(
    context_tensor, source, target, n, to_rank, BLOCK: gl.constexpr, MASKED: gl.constexpr, PER_THREAD: gl.constexpr
):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    layout: gl.constexpr = gl.BlockedLayout([PER_THREAD], [iris_gl.threads_per_warp()], [gl.num_warps()], [0])
    offsets = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout=layout)
    if MASKED:
        ctx.store(target + offsets, ctx.load(source + offsets, to_rank, mask=offsets < n), to_rank, mask=offsets < n)
    else:
        ctx.store(target + offsets, ctx.load(source + offsets, to_rank), to_rank)


@gluon.jit
def gluon_2d(
    context_tensor, source, target, n, to_rank, BLOCK: gl.constexpr, MASKED: gl.constexpr, PER_THREAD: gl.constexpr
):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    threads: gl.constexpr = iris_gl.threads_per_warp()
    layout: gl.constexpr = gl.BlockedLayout([1, PER_THREAD], [2, threads // 2], [gl.num_warps(), 1], [1, 0])
    rows = gl.program_id(0) * 16 + gl.arange(0, 16, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, BLOCK // 16, layout=gl.SliceLayout(0, layout))
    offsets = gl.expand_dims(rows, 1) * n + gl.expand_dims(columns, 0)
    if MASKED:
        mask = gl.expand_dims(rows, 1) * 0 + gl.expand_dims(columns, 0) < n
        ctx.store(target + offsets, ctx.load(source + offsets, to_rank, mask=mask), to_rank, mask=mask)
    else:
        ctx.store(target + offsets, ctx.load(source + offsets, to_rank), to_rank)


@gluon.jit
def gluon_functional(
    heap_bases, source, target, n, to_rank, BLOCK: gl.constexpr, MASKED: gl.constexpr, PER_THREAD: gl.constexpr
):
    layout: gl.constexpr = gl.BlockedLayout([PER_THREAD], [iris_gl.threads_per_warp()], [gl.num_warps()], [0])
    offsets = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout=layout)
    if MASKED:
        mask = offsets < n
        value = iris_gl.load(source + offsets, 0, to_rank, heap_bases, mask=mask)
        iris_gl.store(target + offsets, value, 0, to_rank, heap_bases, mask=mask)
    else:
        value = iris_gl.load(source + offsets, 0, to_rank, heap_bases)
        iris_gl.store(target + offsets, value, 0, to_rank, heap_bases)


@triton.jit
def triton_scalar(context_tensor, source, target, to_rank):
    ctx = DeviceContext.initialize(context_tensor)
    ctx.store(target, ctx.load(source, to_rank), to_rank)


@gluon.jit
def gluon_scalar(context_tensor, source, target, to_rank):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    ctx.store(target, ctx.load(source, to_rank), to_rank)


@triton.jit
def triton_signal_wait(context_tensor, data, flag, n, to_rank, BLOCK: tl.constexpr, OP: tl.constexpr):
    """Stores before a release, loads after an acquire: the order that the checks look for."""
    ctx = DeviceContext.initialize(context_tensor)
    offsets = tl.arange(0, BLOCK)
    ctx.store(data + offsets, 1.0, to_rank)
    if OP == "signal":
        ctx.signal(flag, n, to_rank)
    elif OP == "signal_add":
        ctx.signal(flag, n, to_rank, op="add")
    elif OP == "put_signal":
        ctx.put_signal(data + offsets, data + offsets, flag, n, to_rank, op="add")
    elif OP == "wait":
        ctx.wait(flag, n)
    elif OP == "barrier":
        ctx.barrier(flag)
    elif OP == "cas":
        ctx.atomic_cas(flag, 0, n, to_rank)
    elif OP == "fence":
        ctx.fence()
    else:
        ctx.atomic_add(flag, n, to_rank)
    tl.store(data + offsets, tl.load(data + offsets + BLOCK) + 1.0)


@gluon.jit
def gluon_signal_wait(context_tensor, data, flag, n, to_rank, BLOCK: gl.constexpr, OP: gl.constexpr):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    layout: gl.constexpr = gl.BlockedLayout([4], [iris_gl.threads_per_warp()], [gl.num_warps()], [0])
    offsets = gl.arange(0, BLOCK, layout=layout)
    ctx.store(data + offsets, 1.0, to_rank)
    if OP == "signal":
        ctx.signal(flag, n, to_rank)
    elif OP == "signal_add":
        ctx.signal(flag, n, to_rank, op="add")
    elif OP == "put_signal":
        ctx.put_signal(data + offsets, data + offsets, flag, n, to_rank, op="add")
    elif OP == "wait":
        ctx.wait(flag, n)
    elif OP == "barrier":
        ctx.barrier(flag)
    elif OP == "cas":
        ctx.atomic_cas(flag, 0, n, to_rank)
    elif OP == "fence":
        ctx.fence()
    else:
        ctx.atomic_add(flag, n, to_rank)
    gl.store(data + offsets, gl.load(data + offsets + BLOCK) + 1.0)


@triton.jit
def triton_hoisted(context_tensor, target, n, to_rank, BLOCK: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    remote = ctx.translate(target, to_rank)
    for start in range(0, n, BLOCK):
        tl.store(remote + start + tl.arange(0, BLOCK), 1.0)


@triton.jit
def triton_is_local(context_tensor, target, n, BLOCK: tl.constexpr):
    """Of one rank, and of a block of ranks."""
    ctx = DeviceContext.initialize(context_tensor)
    ranks = tl.arange(0, BLOCK)
    if ctx.is_local(n):
        tl.store(target + ranks, 1.0, mask=ctx.is_local(ranks))


@gluon.jit
def gluon_is_local(context_tensor, target, n, BLOCK: gl.constexpr):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    ranks = gl.arange(0, BLOCK, layout=gl.BlockedLayout([1], [32], [4], [0]))
    if ctx.is_local(n):
        gl.store(target + ranks, 1.0, mask=ctx.is_local(ranks))


@triton.jit
def few_words(words, out, record):
    """Waits for fewer words than there are threads."""
    i = tl.arange(0, 4)
    (found,) = ll_recv_shared((words + i,), 7, (i < 3,), sources=(i,), record=record)
    tl.store(out + i, found)
