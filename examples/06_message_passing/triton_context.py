"""Message passing with the device context in Triton; gluon_context.py is the same in Gluon.

`rounds` tells the protocol.
"""

import triton
import triton.language as tl
from rounds import command, pass_messages

import iris
from iris import DeviceContext

PRODUCER, CONSUMER = tl.constexpr(0), tl.constexpr(1)


@triton.jit
def produce(context_tensor, source, inbox, full, taken, round, n, BLOCK: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    pid = tl.program_id(0)
    offsets = pid * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    # Adding nothing reads the counter, with an acquire.
    while ctx.atomic_add(taken + pid, 0, PRODUCER, sem="acquire") < round:
        pass
    ctx.store(inbox + offsets, tl.load(source + offsets, mask=mask), CONSUMER, mask=mask)
    ctx.atomic_xchg(full + pid, round + 1, CONSUMER, sem="release")


@triton.jit
def consume(context_tensor, inbox, result, full, taken, round, n, BLOCK: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    pid = tl.program_id(0)
    offsets = pid * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    while ctx.atomic_add(full + pid, 0, CONSUMER, sem="acquire") <= round:
        pass
    tl.store(result + offsets, 2 * tl.load(inbox + offsets, mask=mask), mask=mask)
    ctx.atomic_xchg(taken + pid, round + 1, PRODUCER, sem="release")


def main(ctx: iris.Iris, size: int) -> None:
    pass_messages(ctx, size, ctx.get_device_context(), produce, consume)


if __name__ == "__main__":
    command(main)
