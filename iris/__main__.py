"""The command line: ``python -m iris --help`` lists its commands."""

from pathlib import Path

import click

from iris import requirements
from iris.bench.commands import bench
from iris.bench.options import Numbers, Rate, num_ranks
from iris.commands.launcher import forget_callers_rank, forget_other_launchers
from iris.commands.program import command_line
from iris.errors import IrisError, ProcessUnreachableError


class _Commands(click.Group):
    """Errors of Iris are for the reader: their text and exit status 1, without a traceback."""

    def invoke(self, ctx: click.Context) -> object:
        forget_callers_rank()
        try:
            return super().invoke(ctx)
        except IrisError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Commands)
def commands() -> None:
    """One-sided communication between GPUs from inside Triton and Gluon kernels."""


commands.add_command(bench)


@commands.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--pid", "processes", type=click.IntRange(1), multiple=True, help="Ask this process. May be given several times."
)
def info(as_json: bool, processes: tuple[int, ...]) -> None:
    """What this machine has, how Iris runs on it, and what is missing.

    With --pid: what a running process of yours does, also while it hangs. It prints the process' rank, its heaps and
    the flags in them, what the library has counted, and where each thread is.

    Exit status 1 if Iris cannot run here, or a process cannot be asked.
    """
    if processes:
        _inspect(processes, as_json)
        return
    from iris import info

    report = info.collect()
    info.print_json(report) if as_json else info.show(report)
    if not report["mapping"]["works"]:
        raise SystemExit(1)


def _inspect(processes: tuple[int, ...], as_json: bool) -> None:
    import json

    from iris.world import inspection

    answers, failed = [], False
    for process in processes:
        try:
            answers.append(inspection.ask(process))
        except ProcessUnreachableError as error:
            click.echo(f"Error: {error}", err=True)
            failed = True
    if as_json:
        click.echo(json.dumps(answers, indent=2))
    else:
        click.echo("\n\n".join(map(inspection.show, answers)), nl=bool(answers))
    raise SystemExit(failed)


@commands.command()
@click.option(
    "-r", "--num-ranks", type=click.IntRange(2), default=2, show_default=True, help="How many ranks to start."
)
def demo(num_ranks: int) -> None:
    """Ranks exchange data in Triton and Gluon kernels.

    They run on GPUs, or in the simulator where there is no GPU.

    Exit status 1 if a rank fails or receives wrong data.
    """
    requirements.check()
    from iris import demo

    if not demo.run(num_ranks):
        raise SystemExit(1)


ranks_of_program = click.option(
    "-r",
    "--num-ranks",
    type=click.IntRange(1),
    help="How many ranks to start PROGRAM as, by torchrun. If not given, it starts its own. Ignored under torchrun.",
)


# What follows PROGRAM is for PROGRAM, options too.
@commands.command(context_settings={"allow_interspersed_args": False})
@ranks_of_program
@click.option("--seed", type=int, help="Let programs take turns at random, from this seed.")
@click.option(
    "--schedules",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Try this many seeds, from --seed on, and stop at the first that finds something.",
)
@click.option(
    "--time-limit",
    type=click.FloatRange(0),
    default=300,
    show_default=True,
    help="Seconds that a run may take. Then it is ended, and a finding says where each rank was. 0: no limit.",
)
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.argument("program", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def check(
    num_ranks: int | None,
    seed: int | None,
    schedules: int,
    time_limit: float,
    form: str,
    program: Path,
    arguments: tuple[str, ...],
) -> None:
    """Find races, deadlocks and wrong accesses of PROGRAM.

    It runs in the simulator, where every access of every rank is recorded: a race is found even if it did no harm this
    time. PROGRAM starts its own ranks, or --num-ranks says how many to start; or torchrun does: torchrun ... -m iris
    check PROGRAM. Options of this command come before PROGRAM.

    Exit status: 0 if nothing was found, 1 if something was, 2 if the program failed for another reason.
    """
    requirements.check()
    from iris.sanitizer import check

    forget_other_launchers()
    raise SystemExit(check.run(command_line(program, arguments, num_ranks), seed, schedules, form, time_limit))


def drawable(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """A picture's path, before the program has run in vain."""
    if path is not None:
        try:
            from matplotlib.backend_bases import FigureCanvasBase
        except ImportError as error:
            raise click.BadParameter("pictures take matplotlib: pip install matplotlib") from error
        possible = FigureCanvasBase.get_supported_filetypes()
        if path.suffix[1:] not in possible:
            raise click.BadParameter(f"{str(path)!r} does not end in one of {', '.join(sorted(possible))}")
    return path


@commands.command(context_settings={"allow_interspersed_args": False})
@ranks_of_program
@click.option(
    "--out",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    default="trace.json",
    show_default=True,
    help="File for the events, to be opened in https://ui.perfetto.dev.",
)
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    callback=drawable,
    help="Draw the timeline too: SVG, PNG ... by its ending.",
)
@click.option(
    "--max-events", type=click.IntRange(1), default=1_000_000, show_default=True, help="Events kept of each rank."
)
@click.argument("program", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def trace(
    num_ranks: int | None,
    out: Path,
    picture: Path | None,
    max_events: int,
    program: Path,
    arguments: tuple[str, ...],
) -> None:
    """Trace PROGRAM: who moved what, and who waited for whom.

    It traces every kernel, and prints what went where, who waited for what, and what overlapped. PROGRAM starts its own
    ranks, or --num-ranks says how many to start; or torchrun does: torchrun ... -m iris trace PROGRAM. Options of this
    command come before PROGRAM. The exit status is that of PROGRAM.
    """
    requirements.check()
    from iris.tracing import command

    forget_other_launchers()
    raise SystemExit(command.run(command_line(program, arguments, num_ranks), out, picture, max_events))


@commands.command()
@click.option(
    "--largest",
    type=click.IntRange(1),
    help="Largest size, in KiB. If not given, 262144, and in the simulator 128.",
)
@click.option("--smallest", type=click.IntRange(1), default=8, show_default=True, help="Smallest size, in KiB.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the tables to add to, in the place of ~/.config/iris, where Iris looks for them.",
)
@num_ranks()
def tune(largest: int | None, smallest: int, out: Path | None, num_ranks: int | None) -> None:
    """Measure this machine; Iris then chooses algorithms by it.

    Writes collectives.json: which variant of each collective is fastest, for that number of ranks. On several Hopper
    GPUs also operations.json: the figures by which fused operations are chosen, for any number of ranks. Those that
    were fitted to times of whole calls, and not measured, stay as they are.

    It starts the ranks itself, or runs under torchrun. Each size is twice the one before; none is above the largest. On
    one host, where the next size has another fastest variant, it also measures 3/2 of the size. Over several hosts it
    measures Iris' steps beside the vendor's collectives. That table is for as many hosts with as many ranks, and the
    first rank's counts.
    """
    requirements.check()
    from iris import simulator
    from iris.bench import ranks
    from iris.bench import tune as tuning

    # In the simulator a MiB takes seconds.
    largest = largest or (128 if simulator.ACTIVE else 256 << 10)
    if largest < smallest:
        raise click.UsageError(f"--largest {largest} is less than --smallest {smallest}; give {smallest} or more.")
    sizes = [smallest << 10]
    while 2 * sizes[-1] <= largest << 10:
        sizes.append(2 * sizes[-1])
    ranks.run(ranks.number(num_ranks), tuning.run, sizes, out)


@commands.group()
def model() -> None:
    """Predict times by arithmetic, without the hardware."""


@model.command()
@click.option("--hosts", type=Numbers(",", 2), default="2,4,8", show_default=True, help="Numbers of hosts.")
@click.option(
    "--gpus-per-host", type=click.IntRange(1, 1 << 16), default=8, show_default=True, help="GPUs of each host."
)
@click.option(
    "--network",
    type=Rate(),
    default=50,
    show_default=True,
    help="GB/s from each GPU to other hosts, and as many to it.",
)
@click.option(
    "--sizes",
    type=Numbers(",", 1),
    default="256",
    show_default=True,
    help="Sizes of collectives in MiB: the output of all_gather, the input of the others.",
)
@click.option(
    "--shape",
    "shapes",
    type=Numbers("x", 1, count=3),
    multiple=True,
    default=["8192x28672x8192"],
    show_default=True,
    help="Rows, columns and depth of the whole product of a fused operation, in bf16: MxNxK.",
)
@click.option(
    "--device",
    help="The GPU by its name, whose figures in Iris' table count. If not given, that of --results, or NVIDIA H200.",
)
@click.option(
    "--results",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON of `iris bench ccl --out`, of GPUs of one host: its rates of collectives count, not the table's.",
)
@click.option("--stores", type=Rate(), help="GB/s that a GPU's kernel stores to others of its host, not the table's.")
@click.option("--gemm", type=Rate(), help="TFLOPS of a GPU in the vendor's GEMM, not the table's.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    callback=drawable,
    help="Draw it, too: SVG, PNG ... by its ending.",
)
@click.option("--markdown", is_flag=True, help="Print the table alone, in Markdown.")
def hosts(
    hosts: tuple[int, ...],
    gpus_per_host: int,
    network: float,
    sizes: tuple[int, ...],
    shapes: tuple[tuple[int, int, int], ...],
    device: str | None,
    results: Path | None,
    stores: float | None,
    gemm: float | None,
    out: Path | None,
    markdown: bool,
) -> None:
    """When Iris pays over several hosts, beside NCCL and a GEMM.

    By arithmetic, from what was measured within a host. No network was measured. It is for large calls, since latencies
    are left out.
    """
    from iris.bench import hosts_command

    hosts_command.run(hosts, gpus_per_host, network, sizes, shapes, device, results, stores, gemm, out, markdown)


def main() -> None:
    """The console script ``iris``."""
    commands()


if __name__ == "__main__":
    commands(prog_name="python -m iris")
