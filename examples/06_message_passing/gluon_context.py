"""Message passing with the device context in Gluon; triton_context.py is the same in Triton.

`rounds` tells the protocol.
"""

from rounds import command, pass_messages
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import iris
import iris.gluon as iris_gl
from iris.gluon import IrisDeviceCtx

PRODUCER, CONSUMER = gl.constexpr(0), gl.constexpr(1)


@gluon.jit
def produce(context_tensor, source, inbox, full, taken, round, n, BLOCK: gl.constexpr):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    # Four neighbouring int32 a thread: accesses of 16 bytes.
    layout: gl.constexpr = gl.BlockedLayout([4], [iris_gl.threads_per_warp()], [gl.num_warps()], [0])
    pid = gl.program_id(0)
    offsets = pid * BLOCK + gl.arange(0, BLOCK, layout=layout)
    mask = offsets < n
    # Adding nothing reads the counter, with an acquire.
    while ctx.atomic_add(taken + pid, 0, PRODUCER, sem="acquire") < round:
        pass
    ctx.store(inbox + offsets, gl.load(source + offsets, mask=mask), CONSUMER, mask=mask)
    ctx.atomic_xchg(full + pid, round + 1, CONSUMER, sem="release")


@gluon.jit
def consume(context_tensor, inbox, result, full, taken, round, n, BLOCK: gl.constexpr):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    layout: gl.constexpr = gl.BlockedLayout([4], [iris_gl.threads_per_warp()], [gl.num_warps()], [0])
    pid = gl.program_id(0)
    offsets = pid * BLOCK + gl.arange(0, BLOCK, layout=layout)
    mask = offsets < n
    while ctx.atomic_add(full + pid, 0, CONSUMER, sem="acquire") <= round:
        pass
    gl.store(result + offsets, 2 * gl.load(inbox + offsets, mask=mask), mask=mask)
    ctx.atomic_xchg(taken + pid, round + 1, PRODUCER, sem="release")


def main(ctx: iris.Iris, size: int) -> None:
    pass_messages(ctx, size, ctx.get_device_context(), produce, consume)


if __name__ == "__main__":
    command(main)
