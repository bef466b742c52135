"""``python -m iris bench ops``: what it prints and writes."""

import itertools
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from iris import simulator
from iris.bench import operations as measuring
from iris.bench import optional_peers, plots, ranks
from iris.bench.options import check_choices
from iris.bench.report import below_floor, file_name, save_rows
from iris.ccl.select import name_of_ranks
from iris.context import iris
from iris.errors import InvalidValueError


def run(
    operations: tuple[str, ...],
    libraries: tuple[str, ...],
    dtype: str,
    shapes: tuple[tuple[int, int, int], ...],
    sweep: bool,
    floors: Path | None,
    out: Path | None,
    num_ranks: int | None = None,
) -> None:
    """See the command's help. Starts ``num_ranks`` ranks, or is collective over those that torchrun started."""
    check_choices(
        ("--operation", operations, measuring.OPERATIONS),
        ("--library", libraries, measuring.LIBRARIES),
    )
    # Rows to normalise are not of fp8, though the result may be.
    known: Sequence[str] = measuring.OPERATIONS if getattr(torch, dtype).itemsize > 1 else measuring.PRODUCTS
    chosen = list(operations or known)
    if not set(chosen) <= set(known):
        raise click.UsageError(f"{measuring.NORM} adds up rows of fp16, bf16 or fp32, and not of {dtype}.")
    num_ranks = ranks.number(num_ranks)
    pictures = {
        "operations": list(shapes) or measuring.default_shapes(num_ranks),
        "sweep": measuring.SWEEP if sweep else [],
    }
    sizes = list(dict.fromkeys(itertools.chain(*pictures.values())))
    asked = [(name, size) for name in chosen for size in sizes if measuring.is_of(name, size)]
    if not asked:
        raise click.UsageError("Nothing to measure: products have shapes MxNxK, and all_reduce_rms_norm MxNx0.")
    # What is measured by default is left out where the ranks cannot share it.
    problems = {(name, size): measuring.problem(name, size, num_ranks) for name, size in asked}
    for (_, size), problem in problems.items():
        if problem and (size in shapes or all(problems.values())):
            raise click.UsageError(f"--shape {'x'.join(map(str, size))} cannot be measured: {problem}.")
    if libraries and not any(measuring.has(library, name) for library in libraries for name, _ in asked):
        raise click.UsageError(
            f"Nothing to measure: {' and '.join(libraries)} cannot do {' or '.join(chosen)}. "
            "Leave out --library or --operation, or give another."
        )
    ranks.run(num_ranks, run_on_rank, chosen, libraries, dtype, sizes, pictures, floors, out)


def run_on_rank(
    chosen: list[str],
    libraries: tuple[str, ...],
    dtype: str,
    sizes: list[tuple[int, int, int]],
    pictures: dict[str, list[tuple[int, int, int]]],
    floors: Path | None,
    out: Path | None,
) -> list[str]:
    """Collective over the ranks; returns results that are wrong, and figures that miss their floor.

    ``pictures``: what is drawn together, by name. What is written holds all of it.
    """
    largest = max(M * N for M, N, _ in sizes) * max(2, getattr(torch, dtype).itemsize)
    with iris(3 * largest + (64 << 20 if torch.cuda.is_available() else 1 << 20)) as ctx:
        on_gpu, hosts = ctx.device.type == "cuda", ctx.num_hosts
        in_simulator = ("iris", "iris triton", "iris copies")
        known = measuring.ON_ONE_HOST if hosts == 1 else measuring.OVER_HOSTS
        beside = list(libraries or (optional_peers.by_default(known) if on_gpu else in_simulator))
        ranks.check_libraries(beside, hosts, known)
        for library in set(measuring.BESIDE_RAILS).intersection(beside if hosts == 1 else ()):
            raise InvalidValueError(
                f"--library {library!r} is for ranks on several hosts, and these are on one. Ask for iris, or start "
                "ranks on several hosts with torchrun --nnodes."
            )
        rows: list[measuring.Row] = []
        ranks_here = name_of_ranks(ctx.num_local_ranks, hosts)
        name = file_name("operations", dtype, ranks_here)
        console = Console(stderr=True, quiet=ctx.cur_rank > 0)
        with Progress(console=console) as progress:
            cases = [
                name
                for name, size in itertools.product(chosen, sizes)
                if measuring.is_of(name, size) and not measuring.problem(name, size, ctx.num_ranks)
            ]
            total = sum(measuring.has(*case) for case in itertools.product(beside, cases))
            task = progress.add_task("operations", total=total)
            for row in measuring.measure(ctx, chosen, sizes, beside, getattr(torch, dtype)):
                rows.append(row)
                progress.update(task, advance=1)
                if ctx.cur_rank == 0 and out is not None:
                    save_rows(out / f"{name}.csv", ctx.num_ranks, hosts, rows)
        if ctx.cur_rank == 0:
            show(rows)
            if simulator.ACTIVE:
                click.echo(simulator.TIMES)
            if out is not None and find_spec("matplotlib"):
                for picture, shown in pictures.items():
                    drawn = [row for row in rows if row[1:4] in shown]
                    plots.draw_operations(out, file_name(picture, dtype, ranks_here), drawn)
    missed = [
        f"{row.operation} of {row.M} x {row.N} x {row.K} by {row.library}: {row.reason}"
        for row in rows
        if row.failed and row.library.startswith("iris")
    ]
    if floors is not None:
        missed += below_floor(floors, "ops", ctx.num_ranks, figures(rows), hosts)
    return missed


def figures(rows: list[measuring.Row]) -> dict[str, float]:
    """Names as in ``benchmarks/floors.json``: ``all_gather_matmul_8192x8192x8192_us`` of Iris' own choice, in bf16."""
    return {
        f"{row.operation}_{row.M}x{row.N}x{row.K}_us": row.microseconds
        for row in rows
        if row.library == "iris" and row.dtype == "bfloat16" and row.microseconds
    }


def show(rows: list[measuring.Row]) -> None:
    """A table: a line a shape, a column a library; and below it why a library does not take a shape or dtype.

    Errors against float64 stand in brackets, where there are any.
    """
    libraries = list(dict.fromkeys(row.library for row in rows))
    with_error = {row.library for row in rows if row.error is not None}
    columns = (f"{library}, us (error)" if library in with_error else f"{library}, us" for library in libraries)
    table = Table("operation", "M, N, K", *columns)
    cells = {(row[:4], row.library): row for row in rows}
    for case in dict.fromkeys(row[:4] for row in rows):
        line = []
        for library in libraries:
            row = cells.get((case, library))
            if row is None or row.reason and not row.failed:
                line.append("-")
            else:
                error = "" if row.error is None else f" ({row.error:.2g})"
                line.append(row.reason or f"{row.microseconds:.1f}{error}")
        table.add_row(case[0], ", ".join(str(size) for size in case[1:] if size), *line)
    # What a library says may have brackets, which are no markup.
    console = Console(width=150, markup=False)
    console.print(table)
    for library, reason in dict.fromkeys((row.library, row.reason) for row in rows if row.reason and not row.failed):
        console.print(f"{library}: {reason}", highlight=False)
