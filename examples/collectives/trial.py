"""What these examples share: data that differ everywhere, validated rounds, timing, the command line."""

import os
from collections.abc import Callable

import click
import torch

import iris
from iris.bench.options import num_ranks
from iris.ccl import Config
from iris.spawn import launch

SIMULATED = iris.simulator.ACTIVE
ROUNDS = 3


def pattern(shape: int | tuple[int, ...], rank: int, round: int, device: torch.device) -> torch.Tensor:
    """float32, different on each rank and in each round; whole numbers whose sums over ranks are exact."""
    numbers = torch.arange(torch.Size([shape] if isinstance(shape, int) else shape).numel(), device=device)
    return (numbers % 65521 + 1009 * rank + 77 * round).to(torch.float32).reshape(shape)


def trial(
    ctx: iris.Iris,
    name: str,
    size: int,
    prepare: Callable[[int], None],
    call: Callable[[], None],
    check: Callable[[int], None],
) -> None:
    """Several rounds of ``prepare(round)``, ``call()``, ``check(round)``; then the time of ``call()`` alone.

    No barrier stands between them: a collective is ordered with the work around it on its stream, on all ranks.
    """
    for round in range(ROUNDS):
        prepare(round)
        call()
        check(round)
    milliseconds = iris.do_bench(call, ctx.barrier, n_warmup=1, n_repeat=2 if SIMULATED else 20, return_mode="median")
    ctx.barrier()
    if ctx.get_rank() == 0:
        took = "simulated" if SIMULATED else f"{1e3 * milliseconds:.1f} µs"
        print(f"{name}: {ROUNDS} rounds of {size} bytes among {ctx.get_num_ranks()} ranks are right; {took}")


def same(actual: torch.Tensor, expected: torch.Tensor, where: str) -> None:
    """Raise `AssertionError` unless the two are equal."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, msg=lambda text: f"Wrong data on {where}: {text}")


def command(main: Callable[[iris.Iris, int, Config], None], gluon: bool = True) -> None:
    """The command line of an example: starts the ranks, and calls ``main(ctx, size, config)`` on each.

    ``gluon``: the collective has a Gluon form, which ``--gluon`` asks for.
    """

    @click.command(help=main.__globals__["__doc__"])
    @num_ranks(fewest=2, default=2)
    @click.option(
        "--size", type=click.IntRange(min=64), default=20_000 if SIMULATED else 1 << 24, show_default=True,
        help="Bytes of a rank's input.",
    )  # fmt: skip
    def run(num_ranks: int, size: int, use_gluon: bool = False) -> None:
        launch(_worker, num_ranks, main, size, Config(use_gluon=use_gluon))

    if gluon:
        run = click.option("--gluon", "use_gluon", is_flag=True, help="Use the kernels in Gluon.")(run)
    run()


def _worker(main: Callable[[iris.Iris, int, Config], None], size: int, config: Config) -> None:
    with iris.iris(heap_size=room(size, int(os.environ["WORLD_SIZE"]))) as ctx:
        main(ctx, size, config)


def room(size: int, num_ranks: int) -> int:
    """Bytes of heap that an example needs: inputs and results of all ranks."""
    return (2 * num_ranks + 2) * (size + 4096) + (1 << 20)
