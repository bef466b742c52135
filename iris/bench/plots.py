"""Pictures of a benchmark of collectives: bus bandwidth against size, and against multiprocessors, a line a library."""

from pathlib import Path

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
