"""A partition waits for the peer and marks that in shared memory, for a third; another one looks at a mark of its own.

Marks of others tell it nothing: each word of shared memory that may be a flag orders those who use it.
"""

import time

import torch
from program import command
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import iris
from iris.gluon import IrisDeviceCtx

KIND = "race"
COUNT = 128
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def send(context_tensor, inbox, flag):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    i = gl.arange(0, 128, LINE)
    ctx.store(inbox + i, i, 1)  # first
    ctx.signal(flag, 1, 1)


@gluon.jit
def await_data(context_tensor, flag, marks, BROKEN: gl.constexpr):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    ctx.wait(flag, 1)
    marks.index(0).store(gl.full([1], 1, gl.int32, LINE))


@gluon.jit
def compute(inbox, result, marks, BROKEN: gl.constexpr):
    i = gl.arange(0, 128, LINE)
    seen = gl.sum(marks.index(BROKEN).load(LINE), 0)
    while (not BROKEN) and seen == 0:
        seen = gl.sum(marks.index(BROKEN).load(LINE), 0)
    gl.store(result + i, gl.load(inbox + i))  # second


@gluon.jit
def receive(context_tensor, inbox, flag, result, BROKEN: gl.constexpr):
    marks = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for mark in gl.static_range(2):
        marks.index(mark).store(gl.full([1], 0, gl.int32, LINE))
    gl.warp_specialize(
        [
            (await_data, (context_tensor, flag, marks, BROKEN)),
            (compute, (inbox, result, marks, BROKEN)),
        ],
        [4],
        [24],
    )


def main(ctx: iris.Iris, broken: bool) -> None:
    inbox, flag = ctx.zeros(COUNT, dtype=torch.int32), ctx.zeros(1, dtype=torch.int32)
    result = torch.zeros(COUNT, dtype=torch.int32)
    ctx.barrier()
    if ctx.get_rank() == 0:
        send[(1,)](ctx.get_device_context(), inbox, flag)
    else:
        time.sleep(0.1)
        receive[(1,)](ctx.get_device_context(), inbox, flag, result, broken)
        assert broken or torch.equal(result, torch.arange(COUNT, dtype=torch.int32))
    ctx.barrier()


if __name__ == "__main__":
    command(main)
