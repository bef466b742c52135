"""A timeline as a picture, for where there is no browser: SVG, PNG or whatever else matplotlib writes."""

from itertools import groupby
from pathlib import Path

from iris.tracing.summary import is_remote
from iris.tracing.timeline import READS, Event, Timeline

COLOURS = {
    "compute": "#4c78a8",
    "to a peer": "#f58518",
    "from a peer": "#eeca3b",
    "signal": "#54a24b",
    "wait": "#d8b5a5",
    "other": "#b0b0b0",
}
UNITS = {"s": 1e6, "ms": 1e3}
# Above this many, arrows hide what they belong to.
MOST_ARROWS = 200
# Above this many events, a picture by shapes is larger than one by dots.
MOST_SHAPES = 1000
# Programs of a rank that get a line; of more, this many are shown, evenly chosen.
MOST_PROGRAMS = 32


def kind(event: Event) -> str:
    """Which of `COLOURS` it has."""
    if event.name == "compute":
        return "compute"
    if event.is_wait:
        return "wait"
    if event.name == "signal" or (event.form == "flag" and is_remote(event)):
        return "signal"
    if is_remote(event):
        return "from a peer" if event.name in READS else "to a peer"
    return "other"


def draw(timeline: Timeline, path: Path) -> None:
    """``path`` becomes the picture, of the kind that its ending says: a line a program, by rank from above."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    lines = _lines(timeline)
    figure, axes = pyplot.subplots(figsize=(10, 1.2 + max(1.5, min(12, 0.22 * len(lines)))))
    span = max((event.ended for event in timeline.events), default=0.0)
    unit, scale = next(((name, us) for name, us in UNITS.items() if span >= 10 * us), ("µs", 1.0))
    used = set()
    height = 0.8
    for (rank, program), line in lines.items():
        mine = [event for event in timeline.events if (event.rank, event.program) == (rank, program)]
        # Waits, and what the kernel named, lie beneath what happened in them.
        for name, group in groupby(sorted(mine, key=lambda event: -list(COLOURS).index(kind(event))), kind):
            used.add(name)
            bars = [(event.began / scale, (event.ended - event.began) / scale) for event in group]
            style = {"color": COLOURS[name], "linewidth": 0, "rasterized": len(timeline.events) > MOST_SHAPES}
            axes.broken_barh(bars, (line - height / 2, height), **style)
    if len(timeline.flows) <= MOST_ARROWS:
        for cause, effect in timeline.flows:
            one, other = timeline.events[cause], timeline.events[effect]
            ends = [lines.get((event.rank, event.program)) for event in (one, other)]
            if None not in ends:
                arrow = {"arrowstyle": "-|>", "linewidth": 0.5, "color": "#333333", "mutation_scale": 6}
                axes.annotate("", (other.ended / scale, ends[1]), (one.began / scale, ends[0]), arrowprops=arrow)
    _label(axes, lines)
    axes.set_xlabel(unit)
    axes.set_xlim(left=0)
    axes.legend(
        handles=[Patch(color=COLOURS[name], label=name) for name in COLOURS if name in used],
        loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=len(COLOURS), frameon=False,
    )  # fmt: skip
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _lines(timeline: Timeline) -> dict[tuple[int, int], float]:
    """Where each program's line is, from above; ranks are set apart."""
    lines: dict[tuple[int, int], float] = {}
    line = 0.0
    for rank in sorted(timeline.devices):
        programs = sorted({event.program for event in timeline.events if event.rank == rank})
        step = -(-len(programs) // MOST_PROGRAMS)
        for program in programs[:: max(1, step)]:
            lines[rank, program] = line
            line += 1
        line += 0.7
    return lines


def _label(axes, lines: dict[tuple[int, int], float]) -> None:
    """Say which rank is where, and which program if there is room for it."""
    axes.invert_yaxis()
    many = len(lines) > 40
    ticks, labels = [], []
    for rank, group in groupby(lines.items(), lambda item: item[0][0]):
        items = list(group)
        if many:
            ticks.append(sum(line for _, line in items) / len(items))
            labels.append(f"rank {rank}, {len(items)} programs")
        else:
            ticks += [line for _, line in items]
            labels += [f"rank {rank}, program {program}" for (_, program), _ in items]
    axes.set_yticks(ticks, labels)
