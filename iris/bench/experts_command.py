"""``python -m iris bench experts``: what it prints and writes."""

from importlib.util import find_spec
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from iris import simulator
from iris.bench import experts as measuring
from iris.bench import plots, ranks
from iris.bench.options import check_choices
from iris.bench.report import below_floor, file_name, save_rows
from iris.ccl.select import name_of_ranks
from iris.context import iris


def run(
    tokens: tuple[int, ...],
    hidden: int,
    num_experts: int,
    top_k: int,
    layouts: tuple[str, ...],
    libraries: tuple[str, ...],
    dtype: str,
    sms: tuple[int, ...],
    floors: Path | None,
    out: Path | None,
    num_ranks: int | None = None,
    low_latency: bool | None = None,
) -> None:
    """See the command's help. Starts ``num_ranks`` ranks, or is collective over those that torchrun started."""
    check_choices(
        ("--layout", layouts, measuring.LAYOUTS),
        ("--library", libraries, measuring.LIBRARIES),
    )
    num_ranks = ranks.number(num_ranks)
    if num_experts % num_ranks:
        raise click.UsageError(
            f"--experts {num_experts} cannot be shared by {num_ranks} ranks; give a multiple of {num_ranks}."
        )
    if top_k > num_experts:
        raise click.UsageError(f"--top-k {top_k} is more than there are experts, {num_experts}.")
    shapes = [measuring.Shape(each, hidden, num_experts, top_k) for each in tokens]
    ranks.run(num_ranks, run_on_rank, shapes, layouts, libraries, dtype, sms, floors, out, low_latency)


def run_on_rank(
    shapes: list[measuring.Shape],
    layouts: tuple[str, ...],
    libraries: tuple[str, ...],
    dtype: str,
    sms: tuple[int, ...],
    floors: Path | None,
    out: Path | None,
    low_latency: bool | None = None,
) -> list[str]:
    """Collective over the ranks; returns results that are wrong, and figures that miss their floors."""
    layouts, libraries = layouts or measuring.LAYOUTS, libraries or measuring.LIBRARIES
    with iris(1 << 20) as ctx:
        ranks.check_libraries(libraries, ctx.num_hosts, ("torch",))
        rows: list[measuring.Row] = []
        name = file_name("experts", dtype, name_of_ranks(ctx.num_local_ranks, ctx.num_hosts))
        console = Console(stderr=True, quiet=ctx.cur_rank > 0)
        with Progress(console=console) as progress:
            of_iris = [library for library in libraries if library != "torch"]
            each = len(layouts) * len(sms) * len(of_iris) + ("torch" in libraries)
            task = progress.add_task("experts", total=len(shapes) * each)
            for row in measuring.measure(ctx, shapes, layouts, sms, libraries, getattr(torch, dtype), low_latency):
                rows.append(row)
                progress.update(task, advance=1)
                if ctx.cur_rank == 0 and out is not None:
                    save_rows(out / f"{name}.csv", ctx.num_ranks, ctx.num_hosts, rows)
        if ctx.cur_rank == 0:
            show(rows)
            if simulator.ACTIVE:
                click.echo(simulator.TIMES)
            if out is not None and find_spec("matplotlib"):
                plots.draw_experts(out, name, rows)
        missed = [f"{row.tokens} tokens, {row.layout or row.library}: {row.reason}" for row in rows if row.reason]
        if floors is not None:
            missed += below_floor(floors, "experts", ctx.num_ranks, figures(rows), ctx.num_hosts)
    return missed


def figures(rows: list[measuring.Row]) -> dict[str, float]:
    """Names as in ``benchmarks/floors.json``: ``pair_1024x7168_us`` of compact bf16 rows, as fp8 there, in a graph."""
    return {
        f"pair_{row.tokens}x{row.hidden}_us": row.graph_microseconds
        for row in rows
        if (row.library, row.layout, row.dtype) == (measuring.FP8, "compact", "bfloat16")
        and row.sms == 0
        and row.graph_microseconds
    }


def show(rows: list[measuring.Row]) -> None:
    """A table: a line a measurement."""
    table = Table("tokens", "library", "layout", "SMs", "in a graph, us", "GB/s", "called, us")
    for row in rows:
        in_graph = "-" if row.graph_microseconds is None else f"{row.graph_microseconds:.1f}"
        rate = "-" if row.link_GBps is None else f"{row.link_GBps:.0f}"
        called = row.reason if row.call_microseconds is None else f"{row.call_microseconds:.1f}"
        limit = "-" if row.library == "torch" else str(row.sms or "own")
        table.add_row(str(row.tokens), row.library, row.layout or "-", limit, in_graph, rate, called)
    # What a library says may have brackets, which are no markup.
    Console(width=150, markup=False).print(table)
