"""Message passing with functional loads, stores and atomics in Triton. `rounds` tells the protocol."""

import triton
import triton.language as tl
from rounds import command, pass_messages

import iris

PRODUCER, CONSUMER = tl.constexpr(0), tl.constexpr(1)


@triton.jit
def produce(heap_bases, source, inbox, full, taken, round, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    offsets = pid * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    # Adding nothing reads the counter, with an acquire. A plain load would not do: it orders nothing, and compilers may
    # take it out of the loop.
    while iris.atomic_add(taken + pid, 0, PRODUCER, PRODUCER, heap_bases=heap_bases, sem="acquire") < round:
        pass
    values = iris.load(source + offsets, PRODUCER, PRODUCER, heap_bases, mask=mask)
    iris.store(inbox + offsets, values, PRODUCER, CONSUMER, heap_bases=heap_bases, mask=mask)
    iris.atomic_xchg(full + pid, round + 1, PRODUCER, CONSUMER, heap_bases=heap_bases, sem="release")


@triton.jit
def consume(heap_bases, inbox, result, full, taken, round, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    offsets = pid * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    while iris.atomic_add(full + pid, 0, CONSUMER, CONSUMER, heap_bases=heap_bases, sem="acquire") <= round:
        pass
    values = iris.load(inbox + offsets, CONSUMER, CONSUMER, heap_bases, mask=mask)
    iris.store(result + offsets, 2 * values, CONSUMER, CONSUMER, heap_bases=heap_bases, mask=mask)
    iris.atomic_xchg(taken + pid, round + 1, CONSUMER, PRODUCER, heap_bases=heap_bases, sem="release")


def main(ctx: iris.Iris, size: int) -> None:
    pass_messages(ctx, size, ctx.get_heap_bases(), produce, consume)


if __name__ == "__main__":
    command(main)
