"""The ranks that a measurement is among: torchrun's, or as many as the command starts itself."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from typing import Any

import click
import torch

from iris import simulator
from iris.context import Iris
from iris.errors import SeveralHostsError
from iris.spawn import launch

SIMULATED_RANKS = 2


def number(asked: int | None) -> int:
    """How many ranks there are or will be: torchrun's, or those that were asked for, or one for each GPU.

    Raises `click.UsageError` if they cannot be started.
    """
    if "RANK" in os.environ:
        size = os.environ.get("WORLD_SIZE", "")
        if not size.isdecimal():
            raise click.UsageError(
                f"RANK={os.environ['RANK']} says that a launcher has started this as a rank, and WORLD_SIZE={size!r} "
                "is no number of ranks. Start it by torchrun, or unset RANK: then it starts ranks itself."
            )
        return int(size)
    if simulator.ACTIVE:
        return asked or SIMULATED_RANKS
    gpus = torch.cuda.device_count()
    if not gpus or (asked or 0) > gpus:
        raise click.UsageError(
            f"This measures among ranks with a GPU each, and cannot start {asked or 'any'}: there are {gpus} GPUs. Ask "
            f"for fewer by --num-ranks, or set {simulator.VARIABLE}=1, where times say nothing about a GPU."
        )
    return asked or gpus


def run(num_ranks: int, work: Callable[..., list[str]], *args: Any) -> None:
    """Call ``work(*args)`` on every rank: on this one under torchrun, else on ``num_ranks`` that are started here.

    ``work``: a function at the top level of a module, which returns what it found wrong, a line each. Raises
    `click.ClickException` with what rank 0 found, or under torchrun this rank.
    """
    wrong: list[str] = []
    if "RANK" in os.environ:
        wrong += work(*args)
    else:
        results = multiprocessing.get_context("spawn").SimpleQueue()

        def listen() -> None:
            while not results.empty():
                wrong.extend(results.get())

        launch(_on_rank, num_ranks, results, work, args, meanwhile=listen)
        listen()
    if wrong:
        raise click.ClickException("; ".join(wrong))


def check_libraries(libraries: Sequence[str], num_hosts: int, over_hosts: Sequence[str]) -> None:
    """Raise `SeveralHostsError` for one that does not span the hosts that there are."""
    for library in libraries:
        if num_hosts > 1 and library not in over_hosts:
            raise SeveralHostsError(f"--library {library!r}", f"Ask for {', '.join(over_hosts)}.")


def failure(error: Exception) -> str:
    """What a row says of a call that failed: the first line of its error."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def on_any_rank(ctx: Iris, found: str) -> str:
    """Why something does not work on any rank, the same on all of them, which go on together; empty if it does.

    Collective over the world.
    """
    reasons = [ctx.broadcast(found, rank) for rank in range(ctx.num_ranks)]
    if len(set(reasons)) == 1:
        return found
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(reasons) if text)


def _on_rank(results: Any, work: Callable[..., list[str]], args: tuple) -> None:
    wrong = work(*args)
    if os.environ["RANK"] == "0":
        results.put(wrong)
