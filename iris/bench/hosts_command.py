"""``python -m iris model hosts``: what the arithmetic of `iris.bench.hosts_model` gives, as a table and a picture."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from iris.bench.hosts_model import COLLECTIVES, FUSED, ITEMSIZE, Measured, Row, collective, fused
from iris.ccl.cluster import Cluster, HostFigures
from iris.ccl.select_over_hosts import TRANSFER_US
from iris.commands.files import written
from iris.errors import InvalidTableError, short_repr
from iris.machine.figures import find

# Whose figures count, if nothing else says it.
DEVICE = "NVIDIA H200"
# The collectives whose rates within a host count. An all_reduce is both of them.
RATES = ("all_gather", "reduce_scatter")
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
    device: str | None,
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
        click.echo(f"Within a host, of each GPU: {described(measured)}.")
        click.echo(f"Measured: {source}. No network was.")
    if out is not None:
        draw(rows, out, f"hosts of {gpus} GPUs, {network:g} GB/s a GPU between them")
        # What is printed besides is what a page has.
        click.echo(f"Picture: {out}", err=markdown)


def measurements(device: str | None, results: Path | None) -> tuple[Measured, str]:
    """What was measured on this kind of GPU, and where that stands.

    ``results``: a file of ``python -m iris bench ccl``, whose largest size counts; else the figures of Iris' table.
    ``device``: that of the results, or `DEVICE`, if it is not given. Raises `InvalidTableError` for a file that has not
    what is needed.
    """
    measured = None if results is None else Results(results)
    if measured is not None and device not in (None, measured.device):
        raise InvalidTableError(
            f"{results} was measured on {measured.device}, and --device is {device}. Leave --device out, or give a "
            f"file that was measured on {device}."
        )
    device = measured.device if measured else device or DEVICE
    figures, source = find(device)
    rates, found = dict.fromkeys(RATES, figures.collective_GBps), f"table of {source}"
    if device not in source:
        found += f", as nobody has measured {device}"
    if measured is not None:
        rates = {name: measured.bus_GBps(name) for name in RATES}
        found += f"; collectives on {measured.num_ranks} x {device}, {measured.path.name}"
    host = HostFigures(
        all_gather_GBps=rates["all_gather"],
        reduce_scatter_GBps=rates["reduce_scatter"],
        link_GBps=figures.copy_engine_GBps,
        memory_GBps=figures.memory_GBps,
        small_us=figures.small_collective_us,
        transfer_us=TRANSFER_US,
    )
    return (
        Measured(
            host,
            stores=figures.stores_GBps,
            beside=figures.stores_beside_product_GBps,
            slowed=figures.product_speed_beside_stores[ITEMSIZE],
            gemm=figures.gemm_TFLOPS[ITEMSIZE],
        ),
        found,
    )


class Results:
    """A file that ``python -m iris bench ccl --out`` has written, on GPUs of one host.

    Attributes
    ----------
    device : str
        The GPUs' name.
    num_ranks : int
        How many there were, one rank on each.
    """

    def __init__(self, path: Path) -> None:
        """Raises `InvalidTableError` if it is another file, or was measured elsewhere."""
        self.path = path
        try:
            content = json.loads(path.read_text())
            rows, self.device, self.num_ranks = content["rows"], content["device"], content["num_ranks"]
            hosts = content.get("num_hosts", 1)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._error(f"is no file of results: {type(error).__name__}: {error}") from error
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise self._error("is no file of results: it has no rows")
        if not isinstance(self.device, str) or self.device.startswith("simulator"):
            raise self._error(f"was measured on {short_repr(self.device)}, whose times say nothing about a GPU")
        if hosts != 1:
            raise self._error(f"was measured over {short_repr(hosts)} hosts, and what is within one counts here")
        if not _is_above_0(self.num_ranks) or self.num_ranks < 2:
            raise self._error(f"was measured on {short_repr(self.num_ranks)} ranks, and a link takes two")
        self._rows: list[dict[str, Any]] = rows

    def bus_GBps(self, collective: str) -> float:
        """Of the largest call of Iris' collective at its own choice. Raises `InvalidTableError` if there is none."""
        wanted = {"collective": collective, "library": "iris", "sms": 0}
        # Those that failed have a reason and no rate.
        rows = [row for row in self._rows if wanted.items() <= row.items() and row.get("bus_GBps") is not None]
        if not rows:
            raise self._error(f"has no {collective} of Iris at its own choice of multiprocessors")
        for row in rows:
            if not all(_is_above_0(row.get(name)) for name in ("bytes", "bus_GBps")):
                raise self._error(
                    f"has {collective} with bytes={short_repr(row.get('bytes'))} and "
                    f"bus_GBps={short_repr(row['bus_GBps'])}, which are to be numbers above 0"
                )
        return float(max(rows, key=lambda row: row["bytes"])["bus_GBps"])

    def _error(self, what: str) -> InvalidTableError:
        return InvalidTableError(
            f"{self.path} {what}. --results takes what was measured on several GPUs of one host, as "
            "`python -m iris bench ccl --library iris --out FOLDER` writes it there."
        )


def _is_above_0(value: object) -> bool:
    """Whether it is a number that can have been measured."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e18


def described(measured: Measured) -> str:
    host = measured.host
    return (
        f"all_gather {host.all_gather_GBps:.0f} GB/s, reduce_scatter {host.reduce_scatter_GBps:.0f} GB/s; a kernel's "
        f"stores {measured.stores:.0f} GB/s alone and {measured.beside:.0f} GB/s beside a product, which slows to "
        f"{measured.slowed:g} of its speed; products {measured.gemm:.0f} TFLOPS; memory {host.memory_GBps:.0f} GB/s"
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
