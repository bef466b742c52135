"""What a context is, initialised in all ways that programs use."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris import DeviceContext
from iris.gluon import IrisDeviceCtx


def make(jit, lang, Context):
    @jit
    def initialise(context_tensor, seen, rank, num_ranks, FORM: tl.constexpr, TRACED: tl.constexpr):
        if FORM == 0:
            ctx = Context.initialize(context_tensor, rank=rank, num_ranks=num_ranks)
        elif FORM == 1:
            ctx = Context.initialize(context_tensor, tracing=TRACED)
        elif FORM == 2:
            ctx = Context.initialize(context_tensor, rank=rank, num_ranks=num_ranks, tracing=TRACED)
        elif FORM == 3:  # as in Triton
            ctx = Context.initialize(context_tensor, rank, num_ranks, TRACED)
        elif FORM == 4:  # as in Gluon
            ctx = Context.initialize(context_tensor, TRACED)
        elif FORM == 5:
            ctx = Context.initialize(context_tensor, TRACED, rank)
        elif FORM == 6:
            ctx = Context.initialize(context_tensor, TRACED, rank, num_ranks)
        elif FORM == 8:  # as in Triton, with one name
            ctx = Context.initialize(context_tensor, rank, num_ranks=num_ranks)
        elif lang is tl:
            ctx = Context.initialize(context_tensor, rank, num_ranks, tracing=TRACED)
        else:
            ctx = Context.initialize(context_tensor, TRACED, rank=rank, num_ranks=num_ranks)
        lang.store(seen, 10 + ctx.cur_rank)
        lang.store(seen + 1, 20 + ctx.num_ranks)
        if ctx.tracing.enabled:
            lang.store(seen + 2, 1)

    return initialise


triton_initialise = make(triton.jit, tl, DeviceContext)
gluon_initialise = make(gluon.jit, gl, IrisDeviceCtx)
