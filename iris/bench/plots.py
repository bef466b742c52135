"""Pictures of the benchmarks, a line a library.

Of collectives, bus bandwidth against size and against multiprocessors, and time against the number of ranks; of fused
operations, the speed against that of the vendor's GEMM and collective; of experts, time against the number of tokens.
Of a model, bars: the speed of each way of communicating against that of the first.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from iris.bench import experts, operations
from iris.bench.collectives import Row
from iris.bench.model import measure as model
from iris.bench.report import file_name
from iris.errors import readable


def _pyplot() -> Any:
    """``matplotlib.pyplot``, drawing to files. Imported when it is used, as it need not be installed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw(folder: Path, num_ranks: int | str, rows: list[Row]) -> list[Path]:
    """One picture a collective, of what ``rows`` hold; returns the files. Over hosts ``num_ranks`` are "2x8"."""
    pyplot = _pyplot()
    files = []
    for collective in dict.fromkeys(row.collective for row in rows):
        measured = [row for row in rows if row.collective == collective and row.microseconds]
        by_size = [row for row in measured if row.sms == 0]
        largest = max((row.bytes for row in measured), default=0)
        by_sms = [row for row in measured if row.sms and row.bytes == largest]
        for name, points, x, label in (
            ("size", by_size, "bytes", "bytes"),
            ("sms", by_sms, "sms", f"multiprocessors, at {readable(largest)}"),
        ):
            if len({getattr(row, x) for row in points}) < 2:
                continue
            figure, axes = pyplot.subplots(figsize=(7, 4))
            for library in dict.fromkeys(row.library for row in points):
                line = sorted((getattr(row, x), row.bus_GBps) for row in points if row.library == library)
                axes.plot(*zip(*line, strict=True), marker="o", markersize=3, label=library)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log" if x == "bytes" else "linear")
            axes.set_xlabel(label)
            axes.set_ylabel("bus bandwidth, GB/s")
            axes.set_title(f"{collective}, {num_ranks} ranks, {points[0].dtype}")
            axes.grid(alpha=0.3)
            axes.legend()
            files.append(folder / f"{file_name(collective, points[0].dtype, num_ranks)}_by_{name}.svg")
            figure.savefig(files[-1], bbox_inches="tight")
            pyplot.close(figure)
    return files


def draw_by_ranks(folder: Path, dtype: str) -> list[Path]:
    """One picture a collective: how its time grows with the ranks of a host, of what was written for several numbers.

    Of data of this ``dtype``.

    On the left with as much data in all, on the right with as much a rank; sizes that were measured with every number.
    """
    pyplot = _pyplot()
    written = [json.loads(file.read_text()) for file in folder.glob("collectives_*.json")]
    written = [
        result
        for result in written
        if result.get("num_hosts", 1) == 1 and {row["dtype"] for row in result["rows"]} == {dtype}
    ]
    ranks = sorted(result["num_ranks"] for result in written)
    # By collective, by what is fixed, by library and size: number of ranks and microseconds.
    lines: defaultdict[str, dict[str, Any]] = defaultdict(
        lambda: {"in all": defaultdict(dict), "a rank": defaultdict(dict)}
    )
    for result in written:
        for row in (Row(**each) for each in result["rows"]):
            if row.library in ("iris", "nccl") and row.sms == 0 and row.microseconds:
                for fixed, size in (("in all", row.bytes), ("a rank", row.bytes / result["num_ranks"])):
                    lines[row.collective][fixed][row.library, size][result["num_ranks"]] = row.microseconds
    files = []
    for collective, by_size in lines.items():
        panels = {
            fixed: {key: line for key, line in sorted(found.items()) if sorted(line) == ranks}
            for fixed, found in by_size.items()
        }
        if len(ranks) < 2 or not any(panels.values()):
            continue
        figure, each_axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
        for axes, (fixed, found) in zip(each_axes, panels.items(), strict=True):
            colours = {size: f"C{i}" for i, size in enumerate(sorted({size for _, size in found}))}
            for (library, size), line in found.items():
                style = {"marker": "o", "label": readable(int(size))} if library == "iris" else {"linestyle": ":"}
                axes.plot(ranks, [line[count] for count in ranks], color=colours[size], markersize=3, **style)
            axes.set_title(f"{collective}, as much data {fixed}")
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(ranks, ranks)
            axes.set_xlabel("ranks")
            axes.grid(alpha=0.3)
            if found:
                axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
        each_axes[0].set_ylabel("µs: Iris, and NCCL dotted")
        files.append(folder / f"{file_name(collective, dtype, 'by_ranks')}.svg")
        figure.savefig(files[-1], bbox_inches="tight")
        pyplot.close(figure)
    return files


def draw_operations(folder: Path, name: str, rows: list[operations.Row]) -> list[Path]:
    """One picture an operation, of what ``rows`` hold: the speed beside the vendor's two calls; returns the files."""
    pyplot = _pyplot()
    files = []
    for operation in dict.fromkeys(row.operation for row in rows):
        measured = [row for row in rows if row.operation == operation and row.microseconds]
        spent: dict[str, dict[tuple, float]] = defaultdict(dict)
        for row in measured:
            spent[row.library][row[1:4]] = row.microseconds or 0.0
        vendors = spent.get("vendor", {})
        shapes = [shape for shape in dict.fromkeys(row[1:4] for row in measured) if shape in vendors]
        if len(shapes) < 2:
            continue
        figure, axes = pyplot.subplots(figsize=(7, 4))
        for library, times in spent.items():
            line = [(i, vendors[shape] / times[shape]) for i, shape in enumerate(shapes) if shape in times]
            axes.plot(*zip(*line, strict=True), marker="o", markersize=3, label=library)
        axes.set_xticks(range(len(shapes)), [" × ".join(str(size) for size in shape if size) for shape in shapes])
        axes.tick_params(axis="x", labelrotation=60, labelsize=7)
        axes.set_ylabel("speed, the vendor's two calls = 1")
        axes.set_title(f"{operation}, {name.rpartition('_')[2]} ranks, {measured[0].dtype}")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
        files.append(folder / f"{operation}_{name}.svg")
        figure.savefig(files[-1], bbox_inches="tight")
        pyplot.close(figure)
    return files


def draw_experts(folder: Path, name: str, rows: list[experts.Row]) -> list[Path]:
    """Dispatch and combine by tokens a rank, in a graph and called one by one; returns the file, if there are several.

    A line for each library, layout and number of multiprocessors.
    """
    pyplot = _pyplot()
    tokens = sorted({row.tokens for row in rows})
    if len(tokens) < 2:
        return []
    lines: dict[str, list[experts.Row]] = defaultdict(list)
    for row in rows:
        lines[" ".join(filter(None, (row.library, row.layout, f"{row.sms} SMs" if row.sms else "")))].append(row)
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axes, title, field in zip(
        panels, ("in a graph", "called one by one"), ("graph_microseconds", "call_microseconds"), strict=True
    ):
        for number, (label, of_line) in enumerate(lines.items()):
            line = sorted((row.tokens, getattr(row, field)) for row in of_line if getattr(row, field))
            axes.plot(*zip(*line, strict=True) if line else ((), ()), f"C{number}o-", markersize=3, label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(tokens, tokens, fontsize=8)
        axes.set_xlabel("tokens a rank")
        axes.set_title(title)
        axes.grid(alpha=0.3)
    _, hidden, num_experts, top_k, dtype = rows[0][:5]
    panels[0].set_ylabel("dispatch and combine, µs")
    panels[1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.suptitle(f"{hidden} wide, {top_k} of {num_experts} experts, {name.rpartition('_')[2]} ranks, {dtype}")
    file = folder / f"{name}.svg"
    figure.savefig(file, bbox_inches="tight")
    pyplot.close(figure)
    return [file]


def draw_model(folder: Path, name: str, rows: list[model.Row]) -> list[Path]:
    """Steps, prompts and training steps, a bar a way; returns the file, if the first way has a time in any of them."""
    pyplot = _pyplot()
    ways = list(dict.fromkeys(row.way for row in rows))
    spent: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row.microseconds:
            spent[f"{row.mode} {row.sequences}"][row.way] = row.microseconds
    cases = [case for case, times in spent.items() if ways[0] in times]
    if len(ways) < 2 or not cases:
        return []
    figure, axes = pyplot.subplots(figsize=(9, 4))
    width = 0.8 / len(ways)
    for number, way in enumerate(ways):
        bars = [(i, spent[case][ways[0]] / spent[case][way]) for i, case in enumerate(cases) if way in spent[case]]
        axes.bar([i + (number + 0.5) * width - 0.4 for i, _ in bars], [speed for _, speed in bars], width, label=way)
    axes.set_xticks(range(len(cases)), cases)
    axes.set_ylabel(f"speed, {ways[0]} = 1")
    axes.set_title(f"{rows[0].model}, {rows[0].layers} layers, {name.rpartition('_')[2]} ranks, {rows[0].dtype}")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    file = folder / f"{name}.svg"
    figure.savefig(file, bbox_inches="tight")
    pyplot.close(figure)
    return [file]
