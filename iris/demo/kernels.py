"""The kernels of the demo: one a way to communicate. Ranks form a ring; "next" is the rank after the caller's."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris.gluon import IrisDeviceCtx, threads_per_warp
from iris.language.context import DeviceContext
from iris.language.functional import store as remote_store


@triton.jit
def store(source, target, n, rank, peer, heap_bases, BLOCK: tl.constexpr):
    """Triton, functional: writes the caller's source into the peer's target."""
    for block in range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(source + offsets, mask=offsets < n)
        remote_store(target + offsets, values, from_rank=rank, to_rank=peer, heap_bases=heap_bases, mask=offsets < n)


@gluon.jit
def get(context_tensor, source, target, n, BLOCK: gl.constexpr):
    """Gluon: reads the next rank's source into the caller's target."""
    ctx = IrisDeviceCtx.initialize(context_tensor)
    layout: gl.constexpr = gl.BlockedLayout([4], [threads_per_warp()], [gl.num_warps()], [0])
    peer = (ctx.cur_rank + 1) % ctx.num_ranks
    for block in range(gl.program_id(0), gl.cdiv(n, BLOCK), gl.num_programs(0)):
        offsets = block * BLOCK + gl.arange(0, BLOCK, layout=layout)
        ctx.get(source + offsets, target + offsets, peer, mask=offsets < n)


@gluon.jit(do_not_specialize=["round"])
def message(context_tensor, source, inbox, result, arrived, taken, round, n, BLOCK: gl.constexpr):
    """Gluon: each program puts its part into the next rank's inbox and raises a flag after it; then reads its own.

    ``arrived[p]`` counts the messages that program p of the previous rank has sent, ``taken[p]`` those that program p
    of the next rank has read, so that its inbox may be overwritten. Grids must be resident as a whole.
    """
    ctx = IrisDeviceCtx.initialize(context_tensor)
    layout: gl.constexpr = gl.BlockedLayout([4], [threads_per_warp()], [gl.num_warps()], [0])
    following = (ctx.cur_rank + 1) % ctx.num_ranks
    previous = (ctx.cur_rank + ctx.num_ranks - 1) % ctx.num_ranks
    pid = gl.program_id(0)
    ctx.wait(taken + pid, round, cmp="ge")
    for block in range(pid, gl.cdiv(n, BLOCK), gl.num_programs(0)):
        offsets = block * BLOCK + gl.arange(0, BLOCK, layout=layout)
        ctx.put(source + offsets, inbox + offsets, following, mask=offsets < n)
    ctx.signal(arrived + pid, round + 1, following)
    ctx.wait(arrived + pid, round + 1, cmp="ge")
    for block in range(pid, gl.cdiv(n, BLOCK), gl.num_programs(0)):
        offsets = block * BLOCK + gl.arange(0, BLOCK, layout=layout)
        gl.store(result + offsets, 2 * gl.load(inbox + offsets, mask=offsets < n), mask=offsets < n)
    ctx.signal(taken + pid, round + 1, previous)


@triton.jit
def meet(context_tensor, source, slots, result, flags, n, BLOCK: tl.constexpr):
    """Triton: every rank stores its part at all ranks, meets them in a barrier, and adds up what all have stored."""
    ctx = DeviceContext.initialize(context_tensor)
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    part = tl.load(source + offsets, mask=mask)
    for peer in range(ctx.num_ranks):
        ctx.store(slots + ctx.cur_rank * n + offsets, part, peer, mask=mask)
    ctx.barrier(flags)
    total = tl.zeros([BLOCK], tl.float32)
    for peer in range(ctx.num_ranks):
        total += tl.load(slots + peer * n + offsets, mask=mask)
    tl.store(result + offsets, total, mask=mask)
    # Nobody stores the next parts before everybody has read these.
    ctx.barrier(flags)


@triton.jit
def count(context_tensor, counter, times):
    """Triton: every program adds 1 to the counter of rank 0, again and again."""
    ctx = DeviceContext.initialize(context_tensor)
    for _ in range(times):
        ctx.atomic_add(counter, 1, 0, sem="relaxed")
