"""Message passing with functional put in Triton: from the producer's memory to the consumer's in one call.

`rounds` tells the protocol. The counters are waited for with a compare-and-swap that leaves them as they are.
"""

import triton
import triton.language as tl
from rounds import command, pass_messages

import iris

PRODUCER, CONSUMER = tl.constexpr(0), tl.constexpr(1)


@triton.jit
def produce(heap_bases, source, inbox, full, taken, round, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    offsets = pid * BLOCK + tl.arange(0, BLOCK)
    while (
        iris.atomic_cas(taken + pid, round, round, PRODUCER, to_rank=PRODUCER, heap_bases=heap_bases, sem="acquire")
        != round
    ):
        pass
    iris.put(source + offsets, inbox + offsets, PRODUCER, CONSUMER, heap_bases=heap_bases, mask=offsets < n)
    iris.atomic_add(full + pid, 1, PRODUCER, CONSUMER, heap_bases=heap_bases, sem="release")


@triton.jit
def consume(heap_bases, inbox, result, full, taken, round, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    offsets = pid * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    while (
        iris.atomic_cas(
            full + pid, round + 1, round + 1, CONSUMER, to_rank=CONSUMER, heap_bases=heap_bases, sem="acquire"
        )
        != round + 1
    ):
        pass
    tl.store(result + offsets, 2 * tl.load(inbox + offsets, mask=mask), mask=mask)
    iris.atomic_add(taken + pid, 1, CONSUMER, PRODUCER, heap_bases=heap_bases, sem="release")


def main(ctx: iris.Iris, size: int) -> None:
    pass_messages(ctx, size, ctx.get_heap_bases(), produce, consume)


if __name__ == "__main__":
    command(main)
