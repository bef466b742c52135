"""Pictures of the benchmarks, a line a library.

Of collectives, bus bandwidth against size and against multiprocessors; of fused operations, the speed against that of
the vendor's GEMM and collective.
"""

from pathlib import Path

from iris.bench import operations
from iris.bench.collectives import Row


def draw(folder: Path, num_ranks: int, rows: list[Row]) -> list[Path]:
    """One picture a collective, of what ``rows`` hold; returns the files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    files = []
    for collective in dict.fromkeys(row.collective for row in rows):
        measured = [row for row in rows if row.collective == collective and row.microseconds]
        by_size = [row for row in measured if row.sms == 0]
        largest = max((row.bytes for row in measured), default=0)
        by_sms = [row for row in measured if row.sms and row.bytes == largest]
        for name, points, x, label in (
            ("size", by_size, "bytes", "bytes"),
            ("sms", by_sms, "sms", f"multiprocessors, at {largest >> 20} MiB"),
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
            files.append(folder / f"{collective}_{num_ranks}_by_{name}.svg")
            figure.savefig(files[-1], bbox_inches="tight")
            pyplot.close(figure)
    return files


def draw_operations(folder: Path, name: str, rows: list[operations.Row]) -> list[Path]:
    """One picture an operation, of what ``rows`` hold: the speed beside the vendor's two calls; returns the files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    files = []
    for operation in dict.fromkeys(row.operation for row in rows):
        measured = [row for row in rows if row.operation == operation and row.microseconds]
        vendors = {row[1:4]: row.microseconds for row in measured if row.library == "vendor"}
        shapes = [shape for shape in dict.fromkeys(row[1:4] for row in measured) if shape in vendors]
        if len(shapes) < 2:
            continue
        figure, axes = pyplot.subplots(figsize=(7, 4))
        for library in dict.fromkeys(row.library for row in measured):
            times = {row[1:4]: row.microseconds for row in measured if row.library == library}
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
