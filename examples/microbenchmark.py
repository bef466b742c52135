"""What the examples 00 to 05 share: data that differ everywhere, timing, validation, tables, and the command line."""

import os
from collections.abc import Callable
from itertools import permutations
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

import iris
from iris.bench.options import num_ranks
from iris.spawn import launch

SIMULATED = iris.simulator.ACTIVE

# Elements that a program moves in one step: 16 KiB, enough 16-byte accesses in flight to fill a link.
BLOCK = 4096
WARMUP, REPEAT = (1, 2) if SIMULATED else (5, 20)
LAUNCHES = WARMUP + REPEAT

NOTE = "In the simulator: the data are validated, the times say nothing about a link."


def pattern(n: int, rank: int, call: int, device: torch.device) -> torch.Tensor:
    """int32 ``[n]``, different at each position, on each rank and in each call."""
    return torch.arange(n, dtype=torch.int32, device=device) + (1_000_003 * rank + 7_919 * call + 1)


def every_pair(ctx: iris.Iris, kernel: Any, outcome: Callable, size: int) -> None:
    """Time and validate ``kernel`` for every ordered pair of ranks: one is the caller, the other its peer.

    Parameters
    ----------
    kernel
        ``kernel(source, target, n, rank, peer, heap_bases, BLOCK)``; ``source`` and ``target`` are int32 ``[n]``.
    outcome
        ``outcome(mine, theirs)``, given the sources of caller and peer, says what the caller's and the peer's
        ``target`` hold after `LAUNCHES` launches; they began with zeros.
    size
        Bytes of ``source``, of which whole words of 4 are moved.
    """
    n, rank, num_ranks = size // 4, ctx.get_rank(), ctx.get_num_ranks()
    size = 4 * n
    source, target = ctx.empty(n, dtype=torch.int32), ctx.empty(n, dtype=torch.int32)
    milliseconds = ctx.zeros(num_ranks, num_ranks, dtype=torch.float64)
    for call, (caller, peer) in enumerate(permutations(range(num_ranks), 2)):
        source.copy_(pattern(n, rank, call, ctx.device))
        target.zero_()
        ctx.barrier()
        if rank == caller:
            args = (source, target, n, rank, peer, ctx.get_heap_bases(), BLOCK)
            time = iris.do_bench(lambda args=args: kernel[(programs(ctx),)](*args), n_warmup=WARMUP, n_repeat=REPEAT)
            ctx.peer(milliseconds, 0)[caller, peer] = time
        ctx.barrier()
        mine, theirs = (pattern(n, each, call, ctx.device) for each in (caller, peer))
        on_caller, on_peer = outcome(mine, theirs)
        expected = {caller: on_caller, peer: on_peer}.get(rank, torch.zeros_like(mine))
        validate(target, expected, f"rank {rank}, after rank {caller} has called with peer {peer}")
    if rank == 0:
        table = Table(title=f"{kernel.__name__}: {size} bytes from each rank to each")
        table.add_column("caller ╲ peer")
        for peer in range(num_ranks):
            table.add_column(str(peer), justify="right")
        for caller, row in enumerate(milliseconds.tolist()):
            table.add_row(str(caller), *("" if time == 0 else speed(size, time) for time in row))
        show(table)


def everyone(ctx: iris.Iris, kernel: Any, size: int) -> None:
    """Time and validate ``kernel`` when all ranks call it at once: in the end each holds every peer's data.

    Parameters
    ----------
    kernel
        ``kernel(source, target, n, rank, num_ranks, heap_bases, BLOCK)``; ``source`` is int32 ``[n]``, ``target``
        ``[num_ranks, n]``. It fills row p of ``target`` with the source of rank p, but for the rank's own row.
    size
        Bytes of ``source``, of which whole words of 4 are moved.
    """
    n, rank, num_ranks = size // 4, ctx.get_rank(), ctx.get_num_ranks()
    size = 4 * n
    source, target = ctx.empty(n, dtype=torch.int32), ctx.empty(num_ranks, n, dtype=torch.int32)
    milliseconds = ctx.zeros(num_ranks, dtype=torch.float64)
    for call in range(2):
        source.copy_(pattern(n, rank, call, ctx.device))
        target.zero_()
        ctx.barrier()
        args = (source, target, n, rank, num_ranks, ctx.get_heap_bases(), BLOCK)
        time = iris.do_bench(
            lambda args=args: kernel[(programs(ctx),)](*args), ctx.barrier, n_warmup=WARMUP, n_repeat=REPEAT
        )
        ctx.peer(milliseconds, 0)[rank] = time
        ctx.barrier()
        for peer in range(num_ranks):
            expected = pattern(n, peer, call, ctx.device) if peer != rank else torch.zeros_like(source)
            validate(target[peer], expected, f"rank {rank}, what came from rank {peer} in call {call}")
    if rank == 0:
        moved = (num_ranks - 1) * size
        table = Table("rank", "bytes", "time, rate", title=f"{kernel.__name__}: all ranks at once")
        for each, time in enumerate(milliseconds.tolist()):
            table.add_row(str(each), str(moved), speed(moved, time))
        show(table)


def programs(ctx: iris.Iris) -> int:
    """One program a multiprocessor; the simulator, which runs them in turn, gets two so that they share the work."""
    return 2 if SIMULATED else ctx.get_cu_count()


def validate(actual: torch.Tensor, expected: torch.Tensor, where: str) -> None:
    """Raise `AssertionError` unless the two are equal."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, msg=lambda text: f"Wrong data on {where}: {text}")


def show(table: Table) -> None:
    console = Console()
    console.print(table)
    if SIMULATED:
        console.print(NOTE)


def speed(size: int, milliseconds: float) -> str:
    return f"{1e3 * milliseconds:.1f} µs, {size / milliseconds / 1e6:.3g} GB/s"


def command(main: Callable[[iris.Iris, int], None], size_on_gpu: int, size_simulated: int) -> None:
    """The command line of an example: starts the ranks, and calls ``main(ctx, size)`` on each."""

    @click.command(help=main.__globals__["__doc__"])
    @num_ranks(fewest=2, default=2)
    @click.option(
        "--size",
        type=click.IntRange(4),
        default=size_simulated if SIMULATED else size_on_gpu,
        help=f"Bytes of a rank's data. By default {size_on_gpu} on GPUs and {size_simulated} in the simulator.",
    )
    def run(num_ranks: int, size: int) -> None:
        launch(_worker, num_ranks, main, size)

    run()


def _worker(main: Callable[[iris.Iris, int], None], size: int) -> None:
    # A source, and a target with a row for each rank; blocks of the heap are whole KiB.
    room = (int(os.environ["WORLD_SIZE"]) + 1) * (size + 1024) + (1 << 20)
    with iris.iris(heap_size=room) as ctx:
        main(ctx, size)
