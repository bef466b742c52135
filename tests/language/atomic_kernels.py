"""The nine atomics, in both languages and forms: ``OP`` names the operation."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import iris
import iris.gluon as iris_gl
from iris import DeviceContext
from iris.gluon import IrisDeviceCtx


@triton.jit
def triton_context(
    context_tensor, heap_bases, target, values, old, n, rank, peer,
    OP: tl.constexpr, SEM: tl.constexpr, SCOPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    ctx = DeviceContext.initialize(context_tensor)
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = o < n
    v = tl.load(values + o, mask=m)
    if OP == "add":
        seen = ctx.atomic_add(target + o, v, peer, mask=m, sem=SEM, scope=SCOPE)
    elif OP == "sub":
        seen = ctx.atomic_sub(target + o, v, peer, mask=m, sem=SEM, scope=SCOPE)
    elif OP == "xchg":
        seen = ctx.atomic_xchg(target + o, v, peer, mask=m, sem=SEM, scope=SCOPE)
    elif OP == "and":
        seen = ctx.atomic_and(target + o, v, peer, mask=m, sem=SEM, scope=SCOPE)
    elif OP == "or":
        seen = ctx.atomic_or(target + o, v, peer, mask=m, sem=SEM, scope=SCOPE)
    elif OP == "xor":
        seen = ctx.atomic_xor(target + o, v, peer, mask=m, sem=SEM, scope=SCOPE)
    elif OP == "min":
        seen = ctx.atomic_min(target + o, v, peer, mask=m, sem=SEM, scope=SCOPE)
    else:
        seen = ctx.atomic_max(target + o, v, peer, mask=m, sem=SEM, scope=SCOPE)
    tl.store(old + o, seen, mask=m)


@triton.jit
def triton_functional(
    context_tensor, heap_bases, target, values, old, n, rank, peer,
    OP: tl.constexpr, SEM: tl.constexpr, SCOPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = o < n
    v = tl.load(values + o, mask=m)
    if OP == "add":
        seen = iris.atomic_add(target + o, v, rank, peer, heap_bases, mask=m, sem=SEM, scope=SCOPE)
    elif OP == "sub":
        seen = iris.atomic_sub(target + o, v, rank, peer, heap_bases, mask=m, sem=SEM, scope=SCOPE)
    elif OP == "xchg":
        seen = iris.atomic_xchg(target + o, v, rank, peer, heap_bases, mask=m, sem=SEM, scope=SCOPE)
    elif OP == "and":
        seen = iris.atomic_and(target + o, v, rank, peer, heap_bases, mask=m, sem=SEM, scope=SCOPE)
    elif OP == "or":
        seen = iris.atomic_or(target + o, v, rank, peer, heap_bases, mask=m, sem=SEM, scope=SCOPE)
    elif OP == "xor":
        seen = iris.atomic_xor(target + o, v, rank, peer, heap_bases, mask=m, sem=SEM, scope=SCOPE)
    elif OP == "min":
        seen = iris.atomic_min(target + o, v, rank, peer, heap_bases, mask=m, sem=SEM, scope=SCOPE)
    else:
        seen = iris.atomic_max(target + o, v, rank, peer, heap_bases, mask=m, sem=SEM, scope=SCOPE)
    tl.store(old + o, seen, mask=m)


@gluon.jit
def gluon_context(
    context_tensor, heap_bases, target, values, old, n, rank, peer,
    OP: gl.constexpr, SEM: gl.constexpr, SCOPE: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    ctx = IrisDeviceCtx.initialize(context_tensor)
    layout: gl.constexpr = gl.BlockedLayout([1], [iris_gl.threads_per_warp()], [gl.num_warps()], [0])
    o = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout=layout)
    m = o < n
    v = gl.load(values + o, mask=m)
    if OP == "add":
        seen = ctx.atomic_add(target + o, v, peer, mask=m, sem=SEM, scope=SCOPE)
    elif OP == "sub":
        seen = ctx.atomic_sub(target + o, v, peer, mask=m, sem=SEM, scope=SCOPE)
    elif OP == "xchg":
        seen = ctx.atomic_xchg(target + o, v, peer, mask=m, sem=SEM, scope=SCOPE)
    elif OP == "and":
        seen = ctx.atomic_and(target + o, v, peer, mask=m, sem=SEM, scope=SCOPE)
    elif OP == "or":
        seen = ctx.atomic_or(target + o, v, peer, mask=m, sem=SEM, scope=SCOPE)
    elif OP == "xor":
        seen = ctx.atomic_xor(target + o, v, peer, mask=m, sem=SEM, scope=SCOPE)
    elif OP == "min":
        seen = ctx.atomic_min(target + o, v, peer, mask=m, sem=SEM, scope=SCOPE)
    else:
        seen = ctx.atomic_max(target + o, v, peer, mask=m, sem=SEM, scope=SCOPE)
    gl.store(old + o, seen, mask=m)


@gluon.jit
def gluon_functional(
    context_tensor, heap_bases, target, values, old, n, rank, peer,
    OP: gl.constexpr, SEM: gl.constexpr, SCOPE: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([1], [iris_gl.threads_per_warp()], [gl.num_warps()], [0])
    o = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout=layout)
    m = o < n
    v = gl.load(values + o, mask=m)
    if OP == "add":
        seen = iris_gl.atomic_add(target + o, v, rank, peer, heap_bases, mask=m, sem=SEM, scope=SCOPE)
    elif OP == "sub":
        seen = iris_gl.atomic_sub(target + o, v, rank, peer, heap_bases, mask=m, sem=SEM, scope=SCOPE)
    elif OP == "xchg":
        seen = iris_gl.atomic_xchg(target + o, v, rank, peer, heap_bases, mask=m, sem=SEM, scope=SCOPE)
    elif OP == "and":
        seen = iris_gl.atomic_and(target + o, v, rank, peer, heap_bases, mask=m, sem=SEM, scope=SCOPE)
    elif OP == "or":
        seen = iris_gl.atomic_or(target + o, v, rank, peer, heap_bases, mask=m, sem=SEM, scope=SCOPE)
    elif OP == "xor":
        seen = iris_gl.atomic_xor(target + o, v, rank, peer, heap_bases, mask=m, sem=SEM, scope=SCOPE)
    elif OP == "min":
        seen = iris_gl.atomic_min(target + o, v, rank, peer, heap_bases, mask=m, sem=SEM, scope=SCOPE)
    else:
        seen = iris_gl.atomic_max(target + o, v, rank, peer, heap_bases, mask=m, sem=SEM, scope=SCOPE)
    gl.store(old + o, seen, mask=m)


@triton.jit
def triton_cas(context_tensor, heap_bases, target, old, expected, value, rank, peer, FUNCTIONAL: tl.constexpr):
    pid = tl.program_id(0)
    if FUNCTIONAL:
        seen = iris.atomic_cas(target + pid, expected, value, rank, peer, heap_bases)
    else:
        seen = DeviceContext.initialize(context_tensor).atomic_cas(target + pid, expected, value, peer)
    tl.store(old + pid, seen)


@gluon.jit
def gluon_cas(context_tensor, heap_bases, target, old, expected, value, rank, peer, FUNCTIONAL: gl.constexpr):
    pid = gl.program_id(0)
    if FUNCTIONAL:
        seen = iris_gl.atomic_cas(target + pid, expected, value, rank, peer, heap_bases)
    else:
        seen = IrisDeviceCtx.initialize(context_tensor).atomic_cas(target + pid, expected, value, peer)
    gl.store(old + pid, seen)


@triton.jit
def triton_count(context_tensor, counter, tickets, rounds, per_program):
    """Every program of every rank draws tickets from rank 0's counter."""
    ctx = DeviceContext.initialize(context_tensor)
    for i in range(rounds):
        ticket = ctx.atomic_add(counter, 1, 0)
        tl.store(tickets + tl.program_id(0) * per_program + i, ticket)


@gluon.jit
def gluon_count(context_tensor, counter, tickets, rounds, per_program):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    for i in range(rounds):
        ticket = ctx.atomic_add(counter, 1, 0)
        gl.store(tickets + gl.program_id(0) * per_program + i, ticket)


@triton.jit
def triton_cas_block(context_tensor, heap_bases, target, old, expected, rank, peer, FUNCTIONAL: tl.constexpr):
    o = tl.arange(0, 64)
    if FUNCTIONAL:
        seen = iris.atomic_cas(target + o, expected, rank * 1000 + o, rank, peer, heap_bases)
    else:
        seen = DeviceContext.initialize(context_tensor).atomic_cas(target + o, expected, rank * 1000 + o, peer)
    tl.store(old + o, seen)


@gluon.jit
def gluon_cas_block(context_tensor, heap_bases, target, old, expected, rank, peer, FUNCTIONAL: gl.constexpr):
    o = gl.arange(0, 64, layout=gl.BlockedLayout([1], [iris_gl.threads_per_warp()], [gl.num_warps()], [0]))
    if FUNCTIONAL:
        seen = iris_gl.atomic_cas(target + o, expected, rank * 1000 + o, rank, peer, heap_bases)
    else:
        seen = IrisDeviceCtx.initialize(context_tensor).atomic_cas(target + o, expected, rank * 1000 + o, peer)
    gl.store(old + o, seen)


@triton.jit
def triton_one_mask(context_tensor, target, peer, chosen, MASK: tl.constexpr):
    """A mask for the whole block: whether this rank is ``chosen``, or a constant."""
    ctx, o = DeviceContext.initialize(context_tensor), tl.arange(0, 128)
    ctx.atomic_add(target + o, 1000 * ctx.cur_rank + o, peer, mask=ctx.cur_rank == chosen if MASK is None else MASK)


@gluon.jit
def gluon_one_mask(context_tensor, target, peer, chosen, MASK: gl.constexpr):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    o = gl.arange(0, 128, layout=gl.BlockedLayout([1], [iris_gl.threads_per_warp()], [gl.num_warps()], [0]))
    ctx.atomic_add(target + o, 1000 * ctx.cur_rank + o, peer, mask=ctx.cur_rank == chosen if MASK is None else MASK)


@triton.jit
def triton_cast(context_tensor, target, plain, values, peer, CONSTANT: tl.constexpr):
    """Adds values of another dtype than the target's: Iris to the peer's copy, and Triton to a tensor of this rank."""
    ctx, o = DeviceContext.initialize(context_tensor), tl.arange(0, 4)
    ctx.atomic_add(target + o, tl.load(values + o), peer)
    ctx.atomic_add(target + 4, CONSTANT, peer)
    tl.atomic_add(plain + o, tl.load(values + o))
    tl.atomic_add(plain + 4, CONSTANT)


@gluon.jit
def gluon_cast(context_tensor, target, plain, values, peer, CONSTANT: gl.constexpr):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    o = gl.arange(0, 4, layout=gl.BlockedLayout([1], [iris_gl.threads_per_warp()], [gl.num_warps()], [0]))
    ctx.atomic_add(target + o, gl.load(values + o), peer)
    ctx.atomic_add(target + 4, CONSTANT, peer)
    gl.atomic_add(plain + o, gl.load(values + o))
    gl.atomic_add(plain + 4, CONSTANT)
