"""Draws a timeline, for where there is no browser: as SVG, PNG or another format of matplotlib."""

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
# If there are more flows than this, none are drawn: the arrows would hide the events.
MOST_ARROWS = 200
# If there are more events than this, they are drawn as pixels also in vector formats: the file is smaller then.
MOST_SHAPES = 500
# How many programs of a rank are shown at most. Of more programs, evenly chosen ones are shown.
MOST_PROGRAMS = 24
MOST_LABELS = 20
# The size of labels, and the least distance between two.
LABEL_POINTS, LABEL_INCHES = 8, 0.13
# The label of a rail's row says what was sent to each rank if there are no more than these, else only the sum.
MOST_TARGETS = 3
BYTES = {"GB": 1e9, "MB": 1e6, "kB": 1e3}


def kind(event: Event) -> str:
    """The key in `COLOURS` of an event."""
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
    """Draw the timeline into the file ``path``, in the format of its suffix.

    Ranks follow each other from above. Each program has a line, or more where it does several things at a time.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    lines, height = _lines(timeline)
    # In inches: at least room for each rank's name, but no more than that of a hundred ranks.
    ranks = len({timeline.events[i].rank for i in lines})
    size = max(1.5, min(8, 0.2 * height), min(20, 0.2 * ranks))
    figure, axes = pyplot.subplots(figsize=(10, size))
    span = max((event.ended for event in timeline.events), default=0.0)
    unit, scale = next(((name, us) for name, us in UNITS.items() if span >= 10 * us), ("µs", 1.0))
    # In the order of COLOURS: what happens within other events comes later there, so it is drawn over them.
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
    """The line of each event that is shown, by the event's index, counted from above; and the number of lines."""
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
    """What the rails of each rank have sent in all, by rank, in words."""
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
    """As in "1.5 MB", with 1 MB as 10^6 bytes, like the rates of the tables."""
    unit = next((unit for unit in BYTES if nbytes >= BYTES[unit]), "B")
    return f"{nbytes / BYTES.get(unit, 1):.3g} {unit}"


def _label(axes: "Axes", timeline: Timeline, lines: dict[int, float], inches: float) -> None:
    """Label the lines: by program if there is room for that, else by rank. ``inches``: the height of a line."""
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
