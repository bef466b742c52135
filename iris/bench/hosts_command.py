"""``python -m iris model hosts``: what the arithmetic of `iris.bench.hosts_model` gives, as a table and a picture."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from iris.bench.hosts_model import COLLECTIVES, FUSED, ITEMSIZE, Cluster, Measured, Row, collective, fused
from iris.commands.files import written
from iris.errors import InvalidTableError
from iris.machine.figures import find

COLUMNS = (
    *("call", "size", "hosts", "rail", "in host", "product"),
    *("Iris at best", "overlapped", "in steps", "NCCL at best", "NCCL", "gain at best", "gain"),
)


def run(
    hosts: Sequence[int],
    gpus: int,
    network: float,
    sizes: Sequence[int],
    shapes: Sequence[tuple[int, int, int]],
    device: str,
    results: Path | None,
    stores: float | None,
    gemm: float | None,
    out: Path | None,
    markdown: bool,
) -> None:
    """See the command's help."""
    measured, source = measurements(device, results)
    if stores is not None:
        # What goes on beside it keeps its proportion.
        measured = replace(measured, stores=stores, beside=stores * measured.beside / measured.stores)
    if gemm is not None:
        measured = replace(measured, gemm=gemm)
    clusters = [Cluster(number, gpus, network) for number in hosts]
    rows = [collective(name, size << 20, each, measured) for name in COLLECTIVES for size in sizes for each in clusters]
    rows += [fused(name, shape, each, measured) for name in FUSED for shape in shapes for each in clusters]
    show(rows, markdown)
    if not markdown:
        click.echo(f"Microseconds, by arithmetic: hosts of {gpus} GPUs, {network:g} GB/s from each to other hosts.")
        click.echo(f"Within a host, GB/s and TFLOPS of a GPU: {described(measured)}.")
        click.echo(f"Measured: {source}. No network was.")
    if out is not None:
        draw(rows, out, f"hosts of {gpus} GPUs, {network:g} GB/s a GPU between them")
        click.echo(f"Picture: {out}")


def measurements(device: str, results: Path | None) -> tuple[Measured, str]:
    """What was measured on this kind of GPU, and where that stands.

    ``results``: a file of ``python -m iris bench ccl``, whose largest size counts; else the figures of Iris' table.
    Raises `InvalidTableError` for a file that has not what is needed.
    """
    figures, source = find(device)
    rates, found = dict.fromkeys(COLLECTIVES, figures.collective_GBps), f"table of {source}"
    if results is not None:
        rates, ranks = {name: rate_of(name, results) for name in COLLECTIVES}, content_of(results)["num_ranks"]
        found += f"; collectives on {ranks} x {content_of(results).get('device')}, {results.name}"
    measured = Measured(
        **rates,
        stores=figures.stores_GBps,
        beside=figures.stores_beside_product_GBps,
        slowed=figures.product_speed_beside_stores[ITEMSIZE],
        gemm=figures.gemm_TFLOPS[ITEMSIZE],
        memory=figures.memory_GBps,
    )
    return measured, found


def content_of(results: Path) -> dict[str, Any]:
    try:
        content = json.loads(results.read_text())
        if not isinstance(content["rows"], list) or not isinstance(content["num_ranks"], int):
            raise ValueError("it has no rows")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidTableError(
            f"{results} is no file of results: {error}. `python -m iris bench ccl --out FOLDER` writes one."
        ) from error
    return content


def rate_of(name: str, results: Path) -> float:
    """GB/s of bus bandwidth of the largest call of Iris' collective in the file."""
    rows = [row for row in content_of(results)["rows"] if isinstance(row, dict)]
    mine = {"collective": name, "library": "iris", "sms": 0}
    found = [row for row in rows if mine.items() <= row.items() and row.get("bus_GBps")]
    if not found:
        raise InvalidTableError(
            f"{results} has no {name} of Iris. `python -m iris bench ccl --library iris --out FOLDER` measures all."
        )
    return max(found, key=lambda row: row["bytes"])["bus_GBps"]


def described(measured: Measured) -> str:
    return (
        f"all_gather {measured.all_gather:.0f}, reduce_scatter {measured.reduce_scatter:.0f}, all_reduce "
        f"{measured.all_reduce:.0f}, a kernel's stores {measured.stores:.0f} alone and {measured.beside:.0f} beside a "
        f"product, which slows to {measured.slowed:g}; products {measured.gemm:.0f}; memory {measured.memory:.0f}"
    )


def show(rows: Sequence[Row], markdown: bool) -> None:
    """A line a call; as Markdown for the documentation."""
    cells = [cells_of(row) for row in rows]
    if markdown:
        for line in (COLUMNS, ("---",) * len(COLUMNS), *cells):
            click.echo(f"| {' | '.join(line)} |")
        return
    table = Table(*COLUMNS)
    for line in cells:
        table.add_row(*line)
    Console(width=170).print(table)


def cells_of(row: Row) -> tuple[str, ...]:
    times = (row.rail, row.in_host, row.product, *times_of(row).values())
    numbers = [f"{time:.0f}" if time else "" for time in times]
    return (row.what, row.size, f"{row.hosts}", *numbers, f"{row.gain:.2f}", f"{row.expected_gain:.2f}")


def times_of(row: Row) -> dict[str, float]:
    """What the picture compares."""
    return {
        "Iris at best": row.bound,
        "Iris, overlapped": row.overlapped,
        "Iris, in steps": row.in_steps,
        "NCCL at best": row.nccl_bound,
        "NCCL": row.nccl,
    }


STYLES = {
    "Iris at best": {"color": "#4c78a8", "linestyle": ":"},
    "Iris, overlapped": {"color": "#4c78a8", "marker": "o"},
    "Iris, in steps": {"color": "#4c78a8", "linestyle": "--", "marker": "s"},
    "NCCL at best": {"color": "#f58518", "linestyle": ":"},
    "NCCL": {"color": "#f58518", "marker": "o"},
}


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """``path`` becomes a picture, of the kind that its ending says: a panel a call, its time by the number of hosts."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    calls = list(dict.fromkeys((row.what, row.size) for row in rows))
    columns = min(3, len(calls))
    shape = {"nrows": -(-len(calls) // columns), "ncols": columns, "squeeze": False}
    figure, axes = pyplot.subplots(figsize=(3.4 * columns, 3 * shape["nrows"]), **shape)
    hosts = sorted({row.hosts for row in rows})
    for panel, (what, size) in zip(axes.flat, calls, strict=False):
        mine = sorted((row for row in rows if (row.what, row.size) == (what, size)), key=lambda row: row.hosts)
        for name, style in STYLES.items():
            panel.plot([row.hosts for row in mine], [times_of(row)[name] for row in mine], label=name, **style)
        panel.set_title(f"{what}\n{size}", fontsize=9)
        panel.set_xscale("log", base=2)
        panel.set_xticks(hosts, hosts)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    for panel in axes.flat[len(calls) :]:
        panel.set_axis_off()
    for panel in axes[:, 0]:
        panel.set_ylabel("µs, by arithmetic")
    for panel in axes.flat[: len(calls)]:
        panel.set_xlabel("hosts")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=len(labels), frameon=False)
    figure.suptitle(title)
    figure.tight_layout()
    with written(path):
        figure.savefig(path, bbox_inches="tight", dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
