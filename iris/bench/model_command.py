"""``python -m iris bench model``: what it prints and writes."""

from importlib.util import find_spec
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from iris import simulator
from iris.bench import plots, ranks
from iris.bench.model import measure as measuring
from iris.bench.model.cases import MODES, Case
from iris.bench.model.dimensions import MODELS, Dimensions
from iris.bench.model.experts import MOST_TOKENS
from iris.bench.model.ways import BY_DEFAULT, WAYS
from iris.bench.options import check_choices
from iris.bench.report import file_name, save_rows
from iris.ccl.select import name_of_ranks
from iris.context import iris

# A training step takes more memory than the weights of a large model leave on few GPUs.
USUAL_MODES = ("decode", "prefill")


def run(
    model: str | None,
    layers: int | None,
    modes: tuple[str, ...],
    batches: tuple[int, ...],
    context: int | None,
    prompts: int,
    ways: tuple[str, ...],
    dtype: str,
    out: Path | None,
    num_ranks: int | None = None,
) -> None:
    """See the command's help. Starts ``num_ranks`` ranks, or is collective over those that torchrun started."""
    model = model or ("tiny" if simulator.ACTIVE else "llama-8b")
    check_choices(
        ("--model", (model,), MODELS),
        ("--mode", modes, MODES),
        ("--way", ways, WAYS),
    )
    context = context or (12 if simulator.ACTIVE else 1024)
    dimensions = MODELS[model]._replace(**({"layers": layers} if layers else {}))
    num_ranks = ranks.number(num_ranks)
    if problem := dimensions.problem(num_ranks):
        raise click.UsageError(f"--model {model} cannot be measured: {problem}.")
    of_mode = {"decode": batches, "prefill": (prompts,), "train": (prompts,)}
    cases = [
        Case(mode, sequences, context)
        for mode in MODES
        if mode in (modes or USUAL_MODES)
        for sequences in of_mode[mode]
    ]
    for case in cases:
        if problem := case.problem(num_ranks):
            raise click.UsageError(f"--prompts {prompts} --context {context} cannot be measured: {problem}.")
        if dimensions.experts and case.tokens > MOST_TOKENS:
            raise click.UsageError(f"A {case.mode} of {case.tokens} tokens is too much: give {MOST_TOKENS} at most.")
    if not any(WAYS[way].suits(case.mode, dimensions) for case in cases for way in ways or BY_DEFAULT):
        raise click.UsageError(
            f"Nothing to measure: {' and '.join(ways)} is for training a mixture of experts. Give --mode train and "
            "--model tiny-moe, or another --way."
        )
    ranks.run(num_ranks, run_on_rank, model, dimensions, cases, tuple(ways or BY_DEFAULT), dtype, out)


def run_on_rank(
    model: str,
    dimensions: Dimensions,
    cases: list[Case],
    ways: tuple[str, ...],
    dtype: str,
    out: Path | None,
) -> list[str]:
    """Collective over the ranks; returns results that are wrong, and ways that failed."""
    with iris(1 << 20) as ctx:
        rows: list[measuring.Row] = []
        name = file_name(f"model_{model}", dtype, name_of_ranks(ctx.num_local_ranks, ctx.num_hosts))
        console = Console(stderr=True, quiet=ctx.cur_rank > 0)
        with Progress(console=console) as progress:
            measured = sum(WAYS[way].suits(case.mode, dimensions) for case in cases for way in ways)
            task = progress.add_task("model", total=measured)
            for row in measuring.measure(ctx, model, dimensions, cases, ways, getattr(torch, dtype)):
                rows.append(row)
                progress.update(task, advance=1)
                if ctx.cur_rank == 0 and out is not None:
                    save_rows(out / f"{name}.csv", ctx.num_ranks, ctx.num_hosts, rows)
        if ctx.cur_rank == 0:
            show(rows)
            if simulator.ACTIVE:
                click.echo(simulator.TIMES)
            if out is not None and find_spec("matplotlib"):
                plots.draw_model(out, name, rows)
    return [f"{row.mode} of {row.sequences}, {row.way}: {row.reason}" for row in rows if row.reason]


def show(rows: list[measuring.Row]) -> None:
    """A table: a line a measurement."""
    first = rows[0]
    error = f"error (of one process in {first.dtype})"
    table = Table("call", "sequences", "way", "us", "tokens/s", error, title=f"{first.model}, {first.layers} layers")
    for row in rows:
        spent = row.reason if row.microseconds is None else f"{row.microseconds:.1f}"
        speed = "-" if row.tokens_per_second is None else f"{row.tokens_per_second:.0f}"
        differs = "-" if row.error is None else f"{row.error:.2e} ({row.error_of_one:.2e})"
        table.add_row(row.mode, f"{row.sequences} of {row.context}", row.way, spent, speed, differs)
    # What a library says may have brackets, which are no markup.
    Console(width=150, markup=False).print(table)
