"""The kernels of `point_to_point.py`. Each moves ``n`` elements once over the link, in steps of ``BLOCK`` a program."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import iris.gluon as iris_gl
from iris import DeviceContext
from iris.gluon import IrisDeviceCtx


@triton.jit
def triton_store(context_tensor, source, target, n, peer, BLOCK: tl.constexpr):
    """Writes the same block of the caller's data again and again: nothing but stores to the peer."""
    ctx = DeviceContext.initialize(context_tensor)
    offsets = tl.arange(0, BLOCK)
    value = tl.load(source + tl.program_id(0) * BLOCK + offsets)
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        ctx.store(target + start + offsets, value, peer, mask=start + offsets < n)


@triton.jit
def by_hand_store(source, remote_target, n, BLOCK: tl.constexpr):
    """The same with the peer's address passed in, and hints to the compiler: what the translation is held against."""
    offsets = tl.max_contiguous(tl.multiple_of(tl.arange(0, BLOCK), BLOCK), BLOCK)
    value = tl.load(source + tl.program_id(0) * BLOCK + offsets)
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        start = tl.multiple_of(start, BLOCK)
        tl.store(remote_target + start + offsets, value, mask=start + offsets < n)


@gluon.jit
def gluon_store(context_tensor, source, target, n, peer, BLOCK: gl.constexpr, VECTOR: gl.constexpr):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    layout: gl.constexpr = gl.BlockedLayout([VECTOR], [iris_gl.threads_per_warp()], [gl.num_warps()], [0])
    offsets = gl.arange(0, BLOCK, layout=layout)
    value = gl.load(source + gl.program_id(0) * BLOCK + offsets)
    for start in range(gl.program_id(0) * BLOCK, n, gl.num_programs(0) * BLOCK):
        ctx.store(target + start + offsets, value, peer, mask=start + offsets < n)


@triton.jit
def triton_load(context_tensor, source, target, n, peer, BLOCK: tl.constexpr):
    """Adds up what the peer has: nothing but loads from it, and one block a program written locally at the end."""
    ctx = DeviceContext.initialize(context_tensor)
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        total += ctx.load(source + start + offsets, peer, mask=start + offsets < n, other=0.0)
    tl.store(target + tl.program_id(0) * BLOCK + offsets, total)


@gluon.jit
def gluon_load(context_tensor, source, target, n, peer, BLOCK: gl.constexpr, VECTOR: gl.constexpr):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    layout: gl.constexpr = gl.BlockedLayout([VECTOR], [iris_gl.threads_per_warp()], [gl.num_warps()], [0])
    offsets = gl.arange(0, BLOCK, layout=layout)
    total = gl.zeros([BLOCK], gl.float32, layout=layout)
    for start in range(gl.program_id(0) * BLOCK, n, gl.num_programs(0) * BLOCK):
        total += ctx.load(source + start + offsets, peer, mask=start + offsets < n, other=0.0)
    gl.store(target + gl.program_id(0) * BLOCK + offsets, total.to(target.dtype.element_ty))


@triton.jit
def triton_get(context_tensor, source, target, n, peer, BLOCK: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    offsets = tl.arange(0, BLOCK)
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        ctx.get(source + start + offsets, target + start + offsets, peer, mask=start + offsets < n)


@triton.jit
def triton_put(context_tensor, source, target, n, peer, BLOCK: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    offsets = tl.arange(0, BLOCK)
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        ctx.put(source + start + offsets, target + start + offsets, peer, mask=start + offsets < n)


@gluon.jit
def gluon_put(context_tensor, source, target, n, peer, BLOCK: gl.constexpr, VECTOR: gl.constexpr):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    layout: gl.constexpr = gl.BlockedLayout([VECTOR], [iris_gl.threads_per_warp()], [gl.num_warps()], [0])
    offsets = gl.arange(0, BLOCK, layout=layout)
    for start in range(gl.program_id(0) * BLOCK, n, gl.num_programs(0) * BLOCK):
        ctx.put(source + start + offsets, target + start + offsets, peer, mask=start + offsets < n)


@triton.jit
def ping_pong(context_tensor, flag, rounds, first):
    """Ranks 0 and 1 hand one flag to and fro: a round is two hops of a release to an acquire."""
    ctx = DeviceContext.initialize(context_tensor)
    if ctx.cur_rank < 2:
        for i in range(first, first + rounds):
            if ctx.cur_rank == 0:
                ctx.signal(flag, i + 1, 1)
            ctx.wait(flag, i + 1, cmp="ge")
            if ctx.cur_rank == 1:
                ctx.signal(flag, i + 1, 0)


@triton.jit
def chase(context_tensor, links, out, steps, peer):
    """Follows a chain of indices in the peer's memory: each load's address is the value of the one before."""
    ctx = DeviceContext.initialize(context_tensor)
    place = tl.load(out)
    for _ in range(steps):
        place = ctx.load(links + place, peer)
    tl.store(out, place)


@triton.jit
def count_up(context_tensor, counter, out, steps, peer):
    """Adds to the peer's counter; each addition's address depends on what the one before it has returned."""
    ctx = DeviceContext.initialize(context_tensor)
    old = tl.load(out)
    for _ in range(steps):
        old = ctx.atomic_add(counter + (old >> 40), 1, peer, sem="relaxed")
    tl.store(out, old)
