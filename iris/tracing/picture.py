"""A timeline as a picture, for where there is no browser: SVG, PNG or whatever else matplotlib writes."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import groupby, pairwise
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from iris.commands.files import written
from iris.tracing.summary import is_remote
from iris.tracing.timeline import RAIL, READS, Event, Timeline, tracks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "other": "#b0b0b0",
    "wait": "#d8b5a5",
    "compute": "#4c78a8",
    "from a peer": "#eeca3b",
    "to a peer": "#f58518",
    "signal": "#54a24b",
    "rail": "#b279a2",
}
UNITS = {"s": 1e6, "ms": 1e3}
# Above this many, arrows hide what they belong to.
MOST_ARROWS = 200
# Above this many events a picture by shapes is larger than one by dots.
MOST_SHAPES = 500
# Programs of a rank that are shown; of more, so many at most, evenly chosen.
MOST_PROGRAMS = 24
MOST_LABELS = 20
# How large labels are, and how far apart at least.
LABEL_POINTS, LABEL_INCHES = 8, 0.13
# Ranks of which the label of a rail's row says what they were sent.
MOST_TARGETS = 3
BYTES = {"GB": 1e9, "MB": 1e6, "kB": 1e3}


def kind(event: Event) -> str:
    """Which of `COLOURS` it has."""
    if event.transfer is not None:
        return "rail"
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
    """``path`` becomes the picture, of the kind that its ending says: by rank from above, a line a program, or more
    where it does several things at a time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    lines, height = _lines(timeline)
    # Of many ranks each has room for its name; but a picture as high as that of a hundred is none.
    ranks = len({timeline.events[i].rank for i in lines})
    size = max(1.5, min(8, 0.2 * height), min(20, 0.2 * ranks))
    figure, axes = pyplot.subplots(figsize=(10, size))
    span = max((event.ended for event in timeline.events), default=0.0)
    unit, scale = next(((name, us) for name, us in UNITS.items() if span >= 10 * us), ("µs", 1.0))
    # In an order in which what happens within something else is drawn after it.
    for name in COLOURS:
        bars: dict[float, list[tuple[float, float]]] = defaultdict(list)
        for i, line in lines.items():
            event = timeline.events[i]
            if kind(event) == name:
                bars[line].append((event.began / scale, (event.ended - event.began) / scale))
        style: dict[str, Any] = {"color": COLOURS[name], "linewidth": 0, "rasterized": len(lines) > MOST_SHAPES}
        for line, spans in bars.items():
            axes.broken_barh(spans, (line - 0.4, 0.8), **style)
    if len(timeline.flows) <= MOST_ARROWS:
        arrow = {"arrowstyle": "-|>", "linewidth": 0.5, "color": "#333333", "mutation_scale": 6}
        for cause, effect in timeline.flows:
            if cause in lines and effect in lines:
                end = timeline.events[effect].ended / scale, lines[effect]
                begin = timeline.events[cause].began / scale, lines[cause]
                axes.annotate("", end, begin, arrowprops=arrow)
    _label(axes, timeline, lines, size * (figure.subplotpars.top - figure.subplotpars.bottom) / (height + 0.5))
    axes.set_ylim(height - 0.5, -1)
    axes.set_xlabel(unit)
    axes.set_xlim(left=0)
    used = {kind(timeline.events[i]) for i in lines}
    handles = [Patch(color=colour, label=name) for name, colour in COLOURS.items() if name in used]
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(COLOURS), frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    with written(path):
        figure.savefig(path, bbox_inches="tight", dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _lines(timeline: Timeline) -> tuple[dict[int, float], float]:
    """On which line the events are that are shown, counted from above, and how many lines there are."""
    lines: dict[int, float] = {}
    height = 0.0
    programs = _programs(timeline.events)
    by_program = groupby(range(len(timeline.events)), lambda i: (timeline.events[i].rank, timeline.events[i].program))
    last, number = None, 0
    for (rank, program), group in by_program:
        if rank != last:
            height += last is not None
            last, number = rank, 0
        if program == RAIL or number % -(-programs[rank] // MOST_PROGRAMS) == 0:
            indices = list(group)
            chosen = tracks([timeline.events[i] for i in indices])
            lines |= {i: height + track for i, track in zip(indices, chosen, strict=True)}
            height += 1 + max(chosen)
        number += program != RAIL
    return lines, height


def _programs(events: Iterable[Event]) -> Counter[int]:
    """How many programs each rank has."""
    return Counter(rank for rank, program in {(event.rank, event.program) for event in events} if program != RAIL)


def _sent(events: Iterable[Event]) -> dict[int, str]:
    """What the rails of each rank have sent in all, in words."""
    bytes_to: dict[int, Counter[int]] = defaultdict(Counter)
    for event in events:
        if event.transfer is not None:
            bytes_to[event.rank].update(dict(zip(event.transfer.targets, event.transfer.sent, strict=True)))
    said = {}
    for rank, sums in bytes_to.items():
        some = sorted((target, nbytes) for target, nbytes in sums.items() if nbytes)
        parts = [f"{_short(nbytes)} to {target}" for target, nbytes in some]
        if len(parts) > MOST_TARGETS:
            parts = [f"{_short(sum(sums.values()))} to {len(parts)} ranks"]
        said[rank] = f": {', '.join(parts)}" if parts else ""
    return said


def _short(nbytes: int) -> str:
    """As in "1.5 MB": of thousands, as the rates in the tables are."""
    unit = next((unit for unit in BYTES if nbytes >= BYTES[unit]), "B")
    return f"{nbytes / BYTES.get(unit, 1):.3g} {unit}"


def _label(axes: "Axes", timeline: Timeline, lines: dict[int, float], inches: float) -> None:
    """Say which rank is where, and which program if there is room for it. ``inches``: the height of a line."""
    programs, every_program = _programs(map(timeline.events.__getitem__, lines)), _programs(timeline.events)
    sent = _sent(timeline.events)

    def of_rank(event: Event) -> str:
        host = f" on {timeline.hosts[event.rank].name}" if event.rank in timeline.hosts else ""
        return f"rank {event.rank}{host}"

    def of_row(event: Event) -> str:
        return f"{of_rank(event)}, {event.row}{sent.get(event.rank, '') if event.transfer is not None else ''}"

    def of_kind(event: Event) -> str:
        if event.transfer is not None:
            return of_row(event)
        some, number = programs[event.rank], every_program[event.rank]
        which = f"{number}" if some == number else f"{some} of {number}"
        return f"{of_rank(event)}, {which} program{'s' * (number > 1)}"

    ticks: dict[str, list[float]] = defaultdict(list)
    apart = 0.0
    for label in (of_row, of_kind, of_rank) if programs.total() <= MOST_LABELS else (of_kind, of_rank):
        ticks.clear()
        for i, line in lines.items():
            ticks[label(timeline.events[i])].append(line)
        middles = sorted((min(places) + max(places)) / 2 for places in ticks.values())
        apart = inches * min((after - before for before, after in pairwise(middles)), default=len(lines))
        if apart >= LABEL_INCHES:
            break
    every = 1 if apart >= LABEL_INCHES else ceil(LABEL_INCHES / apart)
    shown = dict(list(ticks.items())[::every])
    axes.tick_params(axis="y", labelsize=LABEL_POINTS)
    axes.set_yticks([(min(places) + max(places)) / 2 for places in shown.values()], list(shown))
