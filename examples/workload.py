"""What the examples from 07 on share: the command line, random data, validation, times beside those of the vendor."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import iris
from iris.bench.options import num_ranks
from iris.bench.timing import replay_microseconds
from iris.spawn import launch
from iris.tracing.command import show

SIMULATED = iris.simulator.ACTIVE
NOTE = "In the simulator: the times say nothing about a GPU."

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Workload:
    """What the command line asks for. ``m``, ``n``, ``k``: sizes, whose meaning each example's README tells."""

    m: int
    n: int
    k: int
    dtype: torch.dtype
    validate: bool = True
    benchmark: bool = False
    trace: Path | None = None
    rounds: int = 3
    profile: Path | None = None


Main = Callable[..., None]
PROFILE = click.option(
    "--profile", type=click.Path(path_type=Path), metavar="FILE",
    help="Record what host and GPU do in one call, with Iris or not, and print where the time goes.",
)  # fmt: skip


def command(
    main: Main, on_gpus: tuple[int, int, int], simulated: tuple[int, int, int], room: Callable,
    options: Sequence[Callable] = (), profiles: bool = False,
) -> None:  # fmt: skip
    """The command line of an example: starts the ranks, and calls ``main(ctx, workload)`` on each.

    ``on_gpus``, ``simulated``: m, n and k, if the user does not say. ``room(workload, num_ranks)``: bytes of heap.
    ``options``: further `click.option`s, which ``main`` takes by name. ``profiles``: whether there is ``--profile``.
    """
    m, n, k = simulated if SIMULATED else on_gpus

    @click.command(help=main.__globals__["__doc__"])
    @click.option("-m", type=click.IntRange(1), default=m, show_default=True)
    @click.option("-n", type=click.IntRange(1), default=n, show_default=True)
    @click.option("-k", type=click.IntRange(1), default=k, show_default=True)
    @num_ranks(default=2)
    @click.option("--datatype", type=click.Choice(list(DTYPES)), default="bf16", show_default=True)
    @click.option("--validate", is_flag=True, help="Compare the results of several rounds. The default.")
    @click.option("--benchmark", is_flag=True, help="Time it beside the vendor's libraries.")
    @click.option(
        "--trace", type=click.Path(path_type=Path), metavar="FILE",
        help="Record Iris' kernels in one call: FILE is for https://ui.perfetto.dev, and a picture lies beside it.",
    )  # fmt: skip
    def run(
        m: int, n: int, k: int, num_ranks: int, datatype: str, validate: bool, benchmark: bool, trace: Path | None,
        profile: Path | None = None, **own,
    ) -> None:  # fmt: skip
        if trace is not None:
            trace_everything()
        validate = validate or not (benchmark or trace or profile)
        workload = Workload(m, n, k, DTYPES[datatype], validate, benchmark, trace, profile=profile)
        launch(_worker, num_ranks, main, workload, room, own)

    for option in (*options, *((PROFILE,) if profiles else ())):
        option(run)
    run()


def _worker(main: Main, workload: Workload, room: Callable, own: dict) -> None:
    with iris.iris(heap_size=room(workload, int(os.environ["WORLD_SIZE"])) + (1 << 20)) as ctx:
        main(ctx, workload, **own)


def trace_everything() -> None:
    """Have the kernels of the ranks traced, also those of the library, which is decided when they import it."""
    if os.environ.get("IRIS_TRACE") != "1":
        os.environ["IRIS_TRACE"] = "1"
        if "RANK" in os.environ:
            # Under torchrun this process is a rank, and has imported it.
            os.execv(sys.executable, [sys.executable, *sys.argv])


def trace(ctx: iris.Iris, workload: Workload, call: Callable[[], object]) -> None:
    """Record one call, and show what the ranks did in it. On GPUs it is a graph, as the host would be seen else."""
    call()
    ctx.device_barrier()
    ctx.barrier()
    again = call
    if not SIMULATED:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ctx.device_barrier()
            call()
        again = graph.replay
    # After another one, in which the ranks have met.
    again()
    ctx.tracing.reset()
    again()
    timeline = ctx.tracing.timeline()
    if ctx.get_rank() == 0:
        show(timeline, workload.trace, workload.trace.with_suffix(".svg"), Console(width=110))
    ctx.barrier()


def random(ctx: iris.Iris, seed: int, *size: int, dtype: torch.dtype) -> torch.Tensor:
    """Normally distributed numbers, the same on every rank that gives the same seed."""
    generator = torch.Generator(ctx.device).manual_seed(seed)
    return torch.randn(size, generator=generator, device=ctx.device, dtype=torch.float32).to(dtype)


def size_of_sums(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """How large the elements of ``a b`` would be if terms had random signs: the root of the sum of their squares."""
    return (a.float().square() @ b.float().square()).sqrt()


def size_of_means(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None = None) -> torch.Tensor:
    """The same of attention, whose sums are of values times the softmax of scores."""
    scores = q.float() @ k.float().mT / q.shape[-1] ** 0.5
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    return size_of_sums(scores.softmax(dim=-1), v)


def check(
    actual: torch.Tensor, exact: torch.Tensor, torchs: torch.Tensor, where: str, sizes: torch.Tensor | None = None
) -> None:
    """Raise `AssertionError` unless ``actual`` is as near the float64 result as torch's own in the same dtype.

    The largest error may be twice torch's: the order of sums differs. And it may be what rounding makes of the largest
    element. Of many sums that is several times their `size_of_sums`, which are ``sizes``. Of very few, all may be small
    because their terms cancel, but not what was rounded on the way, and torch's error may be small by chance.
    """
    error, allowed = ((result.double() - exact).abs().max().item() for result in (actual, torchs))
    largest = exact.abs().max().item()
    if sizes is not None:
        largest = max(largest, 4 * sizes.max().item())
    allowed = 2 * allowed + torch.finfo(actual.dtype).eps * largest
    if not error <= allowed:
        raise AssertionError(f"Wrong data on {where}: off by {error:.3g}, where {allowed:.3g} is allowed.")


def share(total: int, ctx: iris.Iris, what: str) -> int:
    """A rank's part of ``total``."""
    if total % ctx.num_ranks:
        size = ctx.num_ranks
        raise SystemExit(f"{what} is {total}, which {size} ranks cannot share: give a multiple of {size}.")
    return total // ctx.num_ranks


def microseconds(ctx: iris.Iris, call: Callable[[], object], eager: bool = False) -> float:
    """Of one call on the slowest rank: the median of graph replays on GPUs, one timed call in the simulator.

    ``eager``: of calls as the host enqueues them, for what no graph can capture.
    """
    if SIMULATED:
        mine = 1e3 * iris.do_bench(call, ctx.barrier, n_warmup=0, n_repeat=1)
    elif eager:
        mine = 1e3 * iris.do_bench(call, ctx.barrier, n_warmup=10, n_repeat=30, return_mode="median")
    else:
        call()
        ctx.barrier()
        mine = replay_microseconds(call, ctx.device_barrier, per_graph=5, replays=7, warmups=5)
        ctx.barrier()
    return max(ctx.broadcast(mine, rank) for rank in range(ctx.num_ranks))


def report(ctx: iris.Iris, title: str, calls: dict[str, Callable[[], object]], eager: bool = False) -> dict[str, float]:
    """Time each call in turn, all in one run, and print a table; the first is what others are compared with."""
    # Nothing may be used for the first time in a graph, the communicators of NCCL neither.
    dist.barrier()
    ctx.device_barrier()
    times = {name: microseconds(ctx, call, eager) for name, call in calls.items()}
    if ctx.get_rank() == 0:
        table = Table("", "µs", "of the first's time", title=title)
        first = next(iter(times.values()))
        for name, time in times.items():
            table.add_row(name, f"{time:.1f}", f"{time / first:.2f}")
        console = Console(width=110)
        console.print(table)
        if SIMULATED:
            console.print(NOTE)
    return times


def validated(ctx: iris.Iris, name: str, workload: Workload) -> None:
    """Say so, on rank 0."""
    ctx.barrier()
    if ctx.get_rank() == 0:
        print(f"{name}: {workload.rounds} rounds of {workload.m} x {workload.n} x {workload.k} "
              f"among {ctx.get_num_ranks()} ranks are right")  # fmt: skip
