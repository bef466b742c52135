"""Message passing with signal and wait in Triton: the library chooses the atomics. The form to write new programs in.

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
    ctx.wait(taken + pid, round, cmp="ge")
    ctx.put_signal(source + offsets, inbox + offsets, full + pid, round + 1, to_rank=CONSUMER, mask=offsets < n)


@triton.jit
def consume(context_tensor, inbox, result, full, taken, round, n, BLOCK: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    pid = tl.program_id(0)
    offsets = pid * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    ctx.wait(full + pid, round + 1, cmp="ge")
    tl.store(result + offsets, 2 * tl.load(inbox + offsets, mask=mask), mask=mask)
    ctx.signal(taken + pid, round + 1, PRODUCER)


def main(ctx: iris.Iris, size: int) -> None:
    pass_messages(ctx, size, ctx.get_device_context(), produce, consume)


if __name__ == "__main__":
    command(main)
