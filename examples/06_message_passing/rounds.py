"""What the five forms of message passing share: the rounds, their data, the validation and the command line.

The protocol is the same in all of them. Rank 0 produces, rank 1 consumes; a program on each side handles a block. Two
counters a block, which only ever grow:

=========  ==============  =====================  ==================================================================
counter    lives on        written by             read by, for what
=========  ==============  =====================  ==================================================================
``full``   the consumer    the producer: release  the consumer: acquire. ``round + 1``: the block of ``round`` is there
``taken``  the producer    the consumer: release  the producer: acquire. ``round``: the block before it has been read
=========  ==============  =====================  ==================================================================

The release on ``full`` comes after all of the block's stores, and the acquire before all of its loads: who sees the
counter sees the data. The release on ``taken`` comes after the consumer's loads: the producer cannot overwrite what is
still being read. Nothing is ever reset, so a counter can be used again at once, and the hosts need not meet between
rounds.

Over the link, each round: ``size`` bytes from rank 0 to rank 1, and a counter of 4 bytes in each direction a block.
"""

import time
from typing import Any

import click
import torch
import triton

import iris
from iris.bench.options import num_ranks
from iris.spawn import launch

SIMULATED = iris.simulator.ACTIVE
BLOCK = 1024 if SIMULATED else 4096
ROUNDS = 4 if SIMULATED else 16
DEFAULT_SIZE = 16_000 if SIMULATED else 1 << 24
PRODUCER, CONSUMER = 0, 1


def pass_messages(ctx: iris.Iris, size: int, handle: torch.Tensor, produce: Any, consume: Any) -> None:
    """Pass messages of ``size`` bytes, whole words of 4, from rank 0 to rank 1, `ROUNDS` of them twice; check them all.

    Parameters
    ----------
    handle
        What the kernels reach their peers by: ``ctx.get_heap_bases()`` or ``ctx.get_device_context()``.
    produce
        ``produce(handle, source, inbox, full, taken, round, n, BLOCK)``
    consume
        ``consume(handle, inbox, result, full, taken, round, n, BLOCK)``; writes twice what arrived to ``result``.
    """
    if ctx.get_num_ranks() < 2:
        raise ValueError("Message passing needs two ranks, and there is one: torchrun --nproc-per-node 2.")
    n, rank = size // 4, ctx.get_rank()
    size = 4 * n
    grid = (triton.cdiv(n, BLOCK),)
    source, inbox = ctx.empty(ROUNDS, n, dtype=torch.int32), ctx.empty(n, dtype=torch.int32)
    result = ctx.empty(ROUNDS, n, dtype=torch.int32)
    full, taken = ctx.zeros(grid, dtype=torch.int32), ctx.zeros(grid, dtype=torch.int32)
    for first in (0, ROUNDS):  # the second time everything is compiled, and is what the time below says
        messages = torch.arange(ROUNDS * n, dtype=torch.int32, device=ctx.device).view(ROUNDS, n) + 77 * first
        source.copy_(messages if rank == PRODUCER else -messages)
        result.fill_(-1)
        ctx.barrier()
        begin = time.perf_counter()
        for i in range(ROUNDS):
            if rank == PRODUCER:
                produce[grid](handle, source[i], inbox, full, taken, first + i, n, BLOCK)
            elif rank == CONSUMER:
                consume[grid](handle, inbox, result[i], full, taken, first + i, n, BLOCK)
        ctx.barrier()
        seconds = time.perf_counter() - begin
        if rank == CONSUMER:
            where = f"rank {rank}, rounds {first} to {first + ROUNDS - 1}"
            torch.testing.assert_close(
                result, 2 * messages, rtol=0, atol=0, msg=lambda text, where=where: f"Wrong data on {where}: {text}"
            )
    if rank == CONSUMER:
        rate = "simulated" if SIMULATED else f"{ROUNDS * size / seconds / 1e9:.3g} GB/s"
        print(f"{ROUNDS} messages of {size} bytes from rank 0 to rank 1 are right: {1e3 * seconds:.3g} ms, {rate}")


def command(main: Any) -> None:
    """The command line of an example: starts the ranks, and calls ``main(ctx, size)`` on each."""

    @click.command()
    @num_ranks(fewest=2, default=2)
    @click.option(
        "--size", type=click.IntRange(min=4), default=DEFAULT_SIZE, show_default=True, help="Bytes of a message."
    )
    def run(num_ranks: int, size: int) -> None:
        launch(_worker, num_ranks, main, size)

    run()


def _worker(main: Any, size: int) -> None:
    # Sources and results of all rounds, the inbox, and the counters.
    with iris.iris(heap_size=(2 * ROUNDS + 1) * (size + 1024) + size // BLOCK * 8 + (1 << 20)) as ctx:
        main(ctx, size)
