"""``python -m iris bench ccl``: what it prints and writes."""

import itertools
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from iris import simulator
from iris.bench import collectives as measuring
from iris.bench import optional_peers, ranks
from iris.bench.ceilings import ceilings
from iris.bench.options import check_choices
from iris.bench.report import below_floor
from iris.ccl.select import name_of_ranks
from iris.context import iris
from iris.errors import InvalidValueError, SeveralHostsError

# In the simulator a MiB takes seconds.
SIZES_SIMULATED = tuple(KiB << 10 for KiB in (1, 8, 32, 128))
SIZES = (*SIZES_SIMULATED, *(KiB << 10 for KiB in (512, 2048, 8192, 65536, 262144)))

# What has no part that runs on CPUs.
ON_GPUS = {"nccl windows", "torch"}


def run(
    collectives: tuple[str, ...],
    libraries: tuple[str, ...],
    dtype: str,
    sizes: tuple[int, ...] | None,
    sms: tuple[int, ...],
    floors: Path | None,
    out: Path | None,
    num_ranks: int | None,
) -> None:
    """See the command's help. Starts ``num_ranks`` ranks, or is collective over those that torchrun started.

    ``sizes``: in bytes.
    """
    check_choices(
        ("--collective", collectives, measuring.COLLECTIVES),
        ("--library", libraries, measuring.LIBRARIES),
    )
    chosen = list(collectives or measuring.COLLECTIVES)
    bytes_ = list(sizes or (SIZES_SIMULATED if simulator.ACTIVE else SIZES))
    if "RANK" not in os.environ:
        # Ranks that are started here are on one host.
        check_choice(libraries, sms, 1)
    ranks.run(ranks.number(num_ranks), run_on_rank, chosen, libraries, dtype, bytes_, sms, floors, out)


def run_on_rank(
    chosen: list[str],
    libraries: tuple[str, ...],
    dtype: str,
    bytes_: list[int],
    sms: tuple[int, ...],
    floors: Path | None,
    out: Path | None,
) -> list[str]:
    """Collective over the ranks; returns results that are wrong, and figures that miss their floor."""
    with iris(4 * max(bytes_) + (1 << 30 if torch.cuda.is_available() else 1 << 20)) as ctx:
        on_gpu = ctx.device.type == "cuda"
        hosts = ctx.num_hosts
        beside = list(libraries or by_default(hosts, on_gpu))
        check_choice(beside, sms, hosts)
        rows: list[measuring.Row] = []
        total = len(bytes_) * sum(measuring.has(*case) for case in itertools.product(beside, chosen, sms))
        console = Console(stderr=True, quiet=ctx.cur_rank > 0)
        with Progress(console=console) as progress:
            task = progress.add_task("collectives", total=total)
            for row in measuring.measure(ctx, chosen, bytes_, sms, beside, getattr(torch, dtype)):
                rows.append(row)
                progress.update(task, advance=1)
                if ctx.cur_rank == 0 and out is not None:
                    measuring.write(out, ctx.num_ranks, rows, {}, hosts)
        # Of links within a host.
        ceiling = ceilings(ctx) if hosts == 1 else {}
        if ctx.cur_rank == 0:
            show(rows)
            for name, rate in ceiling.items():
                click.echo(f"{name}: {rate:.0f}")
            if simulator.ACTIVE:
                click.echo(simulator.TIMES)
            if out is not None:
                measuring.write(out, ctx.num_ranks, rows, ceiling, hosts)
                if find_spec("matplotlib"):
                    from iris.bench import plots

                    plots.draw(out, name_of_ranks(ctx.num_local_ranks, hosts), rows)
                    plots.draw_by_ranks(out, dtype)
        missed = [
            f"{row.collective} of {row.bytes} bytes by {row.library}: {row.reason}"
            for row in rows
            if row.reason and row.library.startswith("iris")
        ]
        if floors is not None:
            missed += below_floor(floors, "ccl", ctx.num_ranks, figures(rows), hosts)
    return missed


def check_choice(libraries: Sequence[str], sms: Sequence[int], num_hosts: int) -> None:
    """Raise `SeveralHostsError`, or `InvalidValueError`, for what cannot be measured over so many hosts."""
    ranks.check_libraries(libraries, num_hosts, measuring.OVER_HOSTS)
    steps = measuring.STEPS
    if num_hosts == 1 and steps in libraries:
        raise InvalidValueError(
            f"--library {steps!r} measures the steps that Iris has over several hosts, and these ranks are on one. Ask "
            "for iris, which is all that Iris does here, or start ranks on several hosts with torchrun --nnodes."
        )
    for library in ON_GPUS.intersection(libraries) if simulator.ACTIVE else ():
        raise InvalidValueError(
            f"--library {library!r} measures memory that GPUs share, and the simulator has none. Ask for iris, "
            "'iris gluon', or nccl, which is Gloo here."
        )
    if simulator.ACTIVE and any(sms) and "nccl" in libraries:
        raise InvalidValueError(
            "--sms with --library nccl limits NCCL, and in the simulator that is Gloo, which takes none. Leave one "
            "of them out."
        )
    of_iris = [library for library in libraries if library.startswith("iris")]
    if num_hosts > 1 and any(sms) and of_iris:
        raise SeveralHostsError(
            f"--sms {','.join(map(str, sms))} of --library {' and '.join(map(repr, of_iris))}",
            "Its steps choose their multiprocessors. Leave --sms out, or ask for --library nccl alone.",
        )


def by_default(num_hosts: int, on_gpu: bool) -> Sequence[str]:
    """The libraries that are measured, if none are asked for."""
    if num_hosts > 1:
        return measuring.OVER_HOSTS if on_gpu else ("iris", measuring.STEPS)
    if not on_gpu:
        return "iris", "iris gluon"
    return [library for library in optional_peers.by_default(measuring.LIBRARIES) if library != measuring.STEPS]


def figures(rows: list[measuring.Row]) -> dict[str, float]:
    """Names as in ``benchmarks/floors.json``: ``all_reduce_8KiB_us`` of Iris at its own choice, in bf16."""
    return {
        f"{row.collective}_{kib(row.bytes)}KiB_us": row.microseconds
        for row in rows
        if row.library == "iris" and row.dtype == "bfloat16" and row.sms == 0 and row.microseconds
    }


def kib(nbytes: int) -> str:
    """As ``--sizes`` takes it: ``8`` or ``1.5``."""
    return str(nbytes / 1024).removesuffix(".0")


def show(rows: list[measuring.Row]) -> None:
    """A table: a line a size, a column a library; of sums with their errors against float64."""
    libraries = list(dict.fromkeys(row.library for row in rows))
    also = "; error" if any(row.error is not None for row in rows) else ""
    table = Table("collective", "KiB", "SMs", *(f"{library}, us (GB/s{also})" for library in libraries))
    cells = {(row.collective, row.bytes, row.sms, row.library): row for row in rows}
    for collective, nbytes, limit in dict.fromkeys(row[0:1] + row[2:4] for row in rows):
        line = []
        for library in libraries:
            row = cells.get((collective, nbytes, limit, library))
            if row is None:
                line.append("-")
            else:
                error = "" if row.error is None else f"; {row.error:.2g}"
                line.append(row.reason or f"{row.microseconds:.2f} ({row.bus_GBps:.0f}{error})")
        table.add_row(collective, kib(nbytes), str(limit or "own"), *line)
    # What a library says may have brackets, which are no markup.
    Console(width=150, markup=False).print(table)
