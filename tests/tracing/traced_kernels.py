"""Kernels that are traced, in both languages; what they do can be counted."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import iris
import iris.gluon
from iris import TraceEvent
from iris.language.target import threads_per_warp


@gluon.constexpr_function
def layout():
    return gl.BlockedLayout([1], [threads_per_warp()], [4], [0])


@triton.jit
def triton_range(BLOCK: tl.constexpr):
    return tl.arange(0, BLOCK)


@gluon.jit
def gluon_range(BLOCK: tl.constexpr):
    return gl.arange(0, BLOCK, layout=layout())


def make_kernels(jit, lang, Context, positions):
    @jit
    def everything(context_tensor, box, flags, meetings, n, BLOCK: tl.constexpr, TRACED: tl.constexpr):
        ctx = Context.initialize(context_tensor, tracing=TRACED)
        pid = lang.program_id(0)
        i = positions(BLOCK)
        # What a peer stores, what is fetched of it, and what is put back.
        part = lang.num_programs(0) * BLOCK
        place = box + pid * BLOCK + i
        fetched, returned = place + part, place + 2 * part
        peer = (ctx.cur_rank + 1) % ctx.num_ranks
        work = ctx.tracing.record_event_start(TraceEvent.compute, pid_m=pid, pid_n=7)
        values = lang.cast(i, lang.float32) + pid
        ctx.tracing.record_event_end(work)
        own = ctx.tracing.record_event_start(TraceEvent().put, peer, place, pid, 1, mask=i < n)
        ctx.store(place, values, peer, mask=i < n)
        ctx.tracing.record_event_end(own)
        ctx.signal(flags + pid, 1, peer)
        ctx.wait(flags + pid, 1)
        ctx.load(place, peer, mask=i < n)
        ctx.atomic_add(flags + 8 + pid, 5, peer)
        ctx.atomic_cas(flags + 16 + pid, 3, 4, peer)
        ctx.atomic_xchg(flags + 20 + pid, 9, peer)
        ctx.copy(place, fetched, peer, ctx.cur_rank, mask=i < n)
        ctx.copy(fetched, returned, ctx.cur_rank, peer, mask=i < n)
        ctx.barrier(meetings)

    @jit
    def looks(context_tensor, flags):
        """At a flag of each program's own, which is 0 at first. What changes it unseen is no event."""
        ctx = Context.initialize(context_tensor, tracing=True)
        flag = flags + lang.program_id(0)
        for _ in range(40):
            ctx.atomic_add(flag, 0, ctx.cur_rank)
        lang.store(flag, 3)
        ctx.atomic_add(flag, 0, ctx.cur_rank)
        ctx.atomic_add(flag, 0, ctx.cur_rank)
        ctx.atomic_add(flag, 2, ctx.cur_rank)
        ctx.atomic_add(flag, 0, ctx.cur_rank)
        ctx.atomic_or(flag, 0, ctx.cur_rank)
        for _ in range(30):
            ctx.atomic_cas(flag, 6, 7, ctx.cur_rank)
        lang.store(flag, 6)
        ctx.atomic_cas(flag, 6, 7, ctx.cur_rank)
        ctx.atomic_cas(flag, 6, 7, ctx.cur_rank)

    return everything, looks


triton_everything, triton_looks = make_kernels(triton.jit, tl, iris.DeviceContext, triton_range)
gluon_everything, gluon_looks = make_kernels(gluon.jit, gl, iris.gluon.IrisDeviceCtx, gluon_range)
KERNELS = {"triton": triton_everything, "gluon": gluon_everything}
LOOKS = {"triton": triton_looks, "gluon": gluon_looks}
# Of each event: its name, the value, and what was seen at last.
LOOKED = [
    ("wait", 0, 3),  # 40 looks that saw 0, and one that did not
    ("atomic_add", 0, 3),
    ("atomic_add", 2, 3),
    ("atomic_add", 0, 5),
    ("atomic_or", 0, 5),
    ("wait", 6, 6),
    ("atomic_cas", 6, 7),
]

NAMES = [
    "compute",
    "put",
    "store",
    "signal",
    "wait",
    "load",
    "atomic_add",
    "atomic_cas",
    "atomic_xchg",
    "get",
    "put",
    "barrier",
]
"""The events of a program of these, in their order."""


@triton.jit
def polls(context_tensor, flags, own, peer, round):
    """Message passing by hand: sets the peer's flag, and looks at the own one until it is set."""
    ctx = iris.DeviceContext.initialize(context_tensor, tracing=True)
    ctx.atomic_xchg(flags + own, round, peer, sem="release")
    while ctx.atomic_add(flags + peer, 0, own, sem="acquire") < round:
        pass


@triton.jit
def scatter(context_tensor, box, n, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    """A row of ``box`` for each rank, at once."""
    ctx = iris.DeviceContext.initialize(context_tensor, tracing=True)
    to, i = tl.arange(0, RANKS)[:, None], tl.arange(0, BLOCK)[None, :]
    here = (to < ctx.num_ranks) & (i < n)
    ctx.store(box + ctx.cur_rank * BLOCK + i, i + 0 * to, tl.where(to < ctx.num_ranks, to, 0), mask=here)
