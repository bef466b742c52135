"""Flags and barriers in both languages: the data must be there when the flag is."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import iris.gluon as iris_gl
from iris import DeviceContext
from iris.gluon import IrisDeviceCtx


@triton.jit
def triton_ring(
    context_tensor, inbox, outbox, results, arrived, taken, first, rounds, n, ADDS: tl.constexpr, BLOCK: tl.constexpr
):
    """Each round sends fresh data to the next rank, and hands the inbox back to the previous one when it was read.

    ``arrived`` counts rounds that the previous rank has put: it sets the count, or ADDS to it. ``taken`` counts rounds
    that the next rank has read.
    """
    ctx = DeviceContext.initialize(context_tensor)
    following = (ctx.cur_rank + 1) % ctx.num_ranks
    previous = (ctx.cur_rank + ctx.num_ranks - 1) % ctx.num_ranks
    pid = tl.program_id(0)
    offsets = pid * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    for i in range(first, first + rounds):
        tl.store(outbox + offsets, ctx.cur_rank * 1000003 + i * 1009 + offsets, mask=mask)
        # The next rank has read what was put a round ago, so its inbox may be overwritten.
        ctx.wait(taken + pid, i, cmp="ge")
        if ADDS:
            ctx.put_signal(outbox + offsets, inbox + offsets, arrived + pid, 1, following, mask=mask, op="add")
        else:
            ctx.put_signal(outbox + offsets, inbox + offsets, arrived + pid, i + 1, following, mask=mask)
        ctx.wait(arrived + pid, i + 1, cmp="ge")
        data = tl.load(inbox + offsets, mask=mask)
        wrong = tl.sum((mask & (data != previous * 1000003 + i * 1009 + offsets)).to(tl.int32), axis=0)
        tl.atomic_add(results, wrong)
        # An addition, so that both kinds of signal are used.
        ctx.signal(taken + pid, 1, previous, op="add")


@gluon.jit
def gluon_ring(
    context_tensor, inbox, outbox, results, arrived, taken, first, rounds, n, ADDS: gl.constexpr, BLOCK: gl.constexpr
):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    layout: gl.constexpr = gl.BlockedLayout([1], [iris_gl.threads_per_warp()], [gl.num_warps()], [0])
    following = (ctx.cur_rank + 1) % ctx.num_ranks
    previous = (ctx.cur_rank + ctx.num_ranks - 1) % ctx.num_ranks
    pid = gl.program_id(0)
    offsets = pid * BLOCK + gl.arange(0, BLOCK, layout=layout)
    mask = offsets < n
    for i in range(first, first + rounds):
        gl.store(outbox + offsets, ctx.cur_rank * 1000003 + i * 1009 + offsets, mask=mask)
        ctx.wait(taken + pid, i, cmp="ge")
        if ADDS:
            ctx.put_signal(outbox + offsets, inbox + offsets, arrived + pid, 1, following, mask=mask, op="add")
        else:
            ctx.put_signal(outbox + offsets, inbox + offsets, arrived + pid, i + 1, following, mask=mask)
        ctx.wait(arrived + pid, i + 1, cmp="ge")
        data = gl.load(inbox + offsets, mask=mask)
        wrong = gl.sum((mask & (data != previous * 1000003 + i * 1009 + offsets)).to(gl.int32), axis=0)
        gl.atomic_add(results, wrong)
        ctx.signal(taken + pid, 1, previous, op="add")


@triton.jit
def triton_exchange(
    context_tensor, slots, results, flags, epoch, rounds, n, USE_EPOCH: tl.constexpr, BLOCK: tl.constexpr
):
    """Everybody stores to everybody, meets, checks what all have stored, and meets before it stores again."""
    ctx = DeviceContext.initialize(context_tensor)
    pid = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < n
    for i in range(rounds):
        for peer in range(ctx.num_ranks):
            value = ctx.cur_rank * 1000003 + i * 1009 + pid * 31 + offsets
            ctx.store(slots + (pid * ctx.num_ranks + ctx.cur_rank) * n + offsets, value, peer, mask=mask)
        if USE_EPOCH:
            ctx.barrier(flags, epoch + 2 * i + 1)
        else:
            ctx.barrier(flags)
        for peer in range(ctx.num_ranks):
            data = tl.load(slots + (pid * ctx.num_ranks + peer) * n + offsets, mask=mask)
            wrong = tl.sum((mask & (data != peer * 1000003 + i * 1009 + pid * 31 + offsets)).to(tl.int32), axis=0)
            tl.atomic_add(results, wrong)
        if USE_EPOCH:
            ctx.barrier(flags, epoch + 2 * i + 2)
        else:
            ctx.barrier(flags)


@gluon.jit
def gluon_exchange(
    context_tensor, slots, results, flags, epoch, rounds, n, USE_EPOCH: gl.constexpr, BLOCK: gl.constexpr
):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    layout: gl.constexpr = gl.BlockedLayout([1], [iris_gl.threads_per_warp()], [gl.num_warps()], [0])
    pid = gl.program_id(0)
    offsets = gl.arange(0, BLOCK, layout=layout)
    mask = offsets < n
    for i in range(rounds):
        for peer in range(ctx.num_ranks):
            value = ctx.cur_rank * 1000003 + i * 1009 + pid * 31 + offsets
            ctx.store(slots + (pid * ctx.num_ranks + ctx.cur_rank) * n + offsets, value, peer, mask=mask)
        if USE_EPOCH:
            ctx.barrier(flags, epoch + 2 * i + 1)
        else:
            ctx.barrier(flags)
        for peer in range(ctx.num_ranks):
            data = gl.load(slots + (pid * ctx.num_ranks + peer) * n + offsets, mask=mask)
            wrong = gl.sum((mask & (data != peer * 1000003 + i * 1009 + pid * 31 + offsets)).to(gl.int32), axis=0)
            gl.atomic_add(results, wrong)
        if USE_EPOCH:
            ctx.barrier(flags, epoch + 2 * i + 2)
        else:
            ctx.barrier(flags)


@triton.jit
def triton_fenced(context_tensor, data, flag, n, BLOCK: tl.constexpr):
    """A relaxed flag after a fence is as good as a release."""
    ctx = DeviceContext.initialize(context_tensor)
    offsets = tl.arange(0, BLOCK)
    if ctx.cur_rank == 0:
        ctx.store(data + offsets, offsets + 17, 1, mask=offsets < n)
        ctx.fence()
        ctx.atomic_xchg(flag, 1, 1, sem="relaxed")
    elif ctx.cur_rank == 1:
        ctx.wait(flag, 1)
        tl.store(data + n + offsets, tl.load(data + offsets, mask=offsets < n), mask=offsets < n)


@triton.jit
def triton_compare(context_tensor, flag, value, seen, CMP: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    tl.store(seen, ctx.wait(flag, value, cmp=CMP))


@gluon.jit
def gluon_compare(context_tensor, flag, value, seen, CMP: gl.constexpr):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    gl.store(seen, ctx.wait(flag, value, cmp=CMP))


@triton.jit
def triton_tell(context_tensor, flag, value, peer, OP: tl.constexpr):
    DeviceContext.initialize(context_tensor).signal(flag, value, peer, op=OP)


@gluon.jit
def gluon_tell(context_tensor, flag, value, peer, OP: gl.constexpr):
    IrisDeviceCtx.initialize(context_tensor).signal(flag, value, peer, op=OP)


@triton.jit
def triton_meeting(context_tensor, flags):
    DeviceContext.initialize(context_tensor).barrier(flags)


@gluon.jit
def gluon_meeting(context_tensor, flags):
    IrisDeviceCtx.initialize(context_tensor).barrier(flags)


@triton.jit
def several(context_tensor, flags, peer, FORM: tl.constexpr):
    """Blocks where a flag and its value are one each."""
    ctx = DeviceContext.initialize(context_tensor)
    if FORM == "signal":
        ctx.signal(flags + tl.arange(0, 1), 1, peer)
    elif FORM == "wait":
        ctx.wait(flags + tl.arange(0, 1), 0)
    else:
        ctx.wait(flags, tl.arange(0, 2))


@triton.jit
def triton_identity(context_tensor, out, RANK: tl.constexpr, NUM_RANKS: tl.constexpr):
    """The four names, with rank and size given as constants: they may serve as a shape."""
    ctx = DeviceContext.initialize(context_tensor, RANK, NUM_RANKS)
    size: tl.constexpr = ctx.num_ranks
    tl.store(out + tl.arange(0, size), ctx.cur_rank + tl.zeros([size], tl.int32))
    tl.store(out + NUM_RANKS, ctx.rank)
    tl.store(out + NUM_RANKS + 1, ctx.world_size)


@gluon.jit
def gluon_identity(context_tensor, out, RANK: gl.constexpr, NUM_RANKS: gl.constexpr):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    for i in range(NUM_RANKS):
        gl.store(out + i, ctx.cur_rank)
    gl.store(out + NUM_RANKS, ctx.rank)
    gl.store(out + NUM_RANKS + 1, ctx.world_size)
