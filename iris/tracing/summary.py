"""Prints tables of a timeline: bytes and bandwidth between ranks, time in waits, and communication that is hidden."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from iris import simulator
from iris.errors import names
from iris.tracing.rail_times import ROOM
from iris.tracing.timeline import READS, Event, Timeline, length, merge_spans, overlap


@dataclass(frozen=True)
class Traffic:
    """What went from one rank to another: ``bytes``, and the ``us`` in which at least one program moved some."""

    source: int
    target: int
    bytes: int
    us: float

    @property
    def gbps(self) -> float:
        return self.bytes / self.us / 1e3 if self.us else 0.0


@dataclass(frozen=True)
class Waiting:
    """All waits of a rank for the flags of one tensor, or in one barrier. ``us`` is the sum over its programs."""

    rank: int
    what: str
    flags: int
    times: int
    us: float
    longest_us: float


@dataclass(frozen=True)
class Overlap:
    """How long a rank computed, how long it moved data to or from peers, and how long it did both at once."""

    rank: int
    compute_us: float
    communication_us: float
    both_us: float


def is_remote(event: Event) -> bool:
    """Whether it moves data between two ranks."""
    if event.transfer is not None:
        return any((*event.transfer.sent, *event.transfer.received))
    return not event.is_wait and event.target is not None and event.target != event.rank and event.bytes > 0


def moves(timeline: Timeline) -> list[Event]:
    """The events that move data between ranks. An event that the kernel named around others of them is left out."""
    events = timeline.events
    remote = [i for i, event in enumerate(events) if is_remote(event)]
    outer = _around(events, remote, lambda event: event.form != "flag")
    return [events[i] for i in remote if i not in outer]


def _around(events: list[Event], among: Iterable[int], counts: Callable[[Event], bool]) -> set[int]:
    """Of the events ``among`` these: those that the kernel has named, and that contain others for which ``counts``."""
    outer: set[int] = set()
    named: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for i in among:
        event = events[i]
        around = named[event.rank, event.program, event.context]
        while around and events[around[-1]].ended < event.ended:
            around.pop()
        if counts(event):
            outer.update(around)
        if event.form == "named":
            around.append(i)
    return outer


def traffic(timeline: Timeline) -> list[Traffic]:
    """By pair of ranks, without accesses to several ranks at once (a block of ranks). Of a rail the sender counts."""
    pairs: dict[tuple[int, int], list[Event]] = defaultdict(list)
    moved: dict[tuple[int, int], int] = defaultdict(int)
    for event in moves(timeline):
        if event.transfer is not None:
            to_each = zip(event.transfer.targets, event.transfer.sent, strict=True)
            several = {(event.rank, target): nbytes for target, nbytes in to_each if nbytes}
        elif event.target is None or event.target < 0:
            continue
        else:
            ends = (event.target, event.rank) if event.name in READS else (event.rank, event.target)
            several = {ends: event.bytes}
        for ends, nbytes in several.items():
            pairs[ends].append(event)
            moved[ends] += nbytes
    return [
        Traffic(*ends, moved[ends], length(merge_spans((event.began, event.ended) for event in events)))
        for ends, events in sorted(pairs.items())
    ]


def waiting(timeline: Timeline) -> list[Waiting]:
    """By rank and flags, those with the longest time first."""
    waits: dict[tuple[int, str], list[Event]] = defaultdict(list)
    found = [i for i, event in enumerate(timeline.events) if event.is_wait]
    outer = _around(timeline.events, found, lambda _: True)
    for i in found:
        event = timeline.events[i]
        if i not in outer:
            waits[event.rank, f"{event.name}: {event.thing or 'a flag that is not known'}"].append(event)
    sums = []
    for (rank, what), events in waits.items():
        us = [event.ended - event.began for event in events]
        sums.append(Waiting(rank, what, len({event.place for event in events}), len(us), sum(us), max(us)))
    return sorted(sums, key=lambda each: -each.us)


def overlaps(timeline: Timeline) -> list[Overlap]:
    """By rank."""
    computing, moving = defaultdict(list), defaultdict(list)
    for event in timeline.events:
        if event.name == "compute":
            computing[event.rank].append((event.began, event.ended))
    for event in moves(timeline):
        moving[event.rank].append((event.began, event.ended))
    found = []
    for rank in sorted(timeline.devices):
        compute, communication = merge_spans(computing[rank]), merge_spans(moving[rank])
        found.append(Overlap(rank, length(compute), length(communication), overlap(compute, communication)))
    return found


def show(timeline: Timeline, console: Console) -> None:
    """Print all tables."""
    events, flows = len(timeline.events), len(timeline.flows)
    end = max((event.ended for event in timeline.events), default=0.0)
    console.print(
        f"{events} events of {len(timeline.devices)} ranks in {end:.1f} µs, {flows} flows from cause to wait."
    )
    if "cpu" in timeline.devices.values():
        console.print(simulator.TIMES)
    worst = max((error for error in timeline.clock_error.values() if error < math.inf), default=0.0)
    if worst:
        console.print(f"Clocks agree within {worst:.3f} µs.")
    elif not timeline.apart:
        console.print("All ranks read one clock.")
    for ranks in timeline.apart:
        console.print(
            f"[yellow]Nobody has compared the clocks of {names(ranks)} with that of rank {timeline.reference}, as no "
            "context has both: their first event is shown at 0 µs. A context of all ranks compares all clocks.[/]"
        )
    for rank, lost in timeline.lost.items():
        if lost:
            of_rails = f" There is room for {ROOM} transfers between hosts." if timeline.hosts else ""
            console.print(
                f"[yellow]Rank {rank} lost its last {lost} events: make room for more (max_events), or record less."
                f"{of_rails}[/]"
            )
    if pairs := traffic(timeline):
        table = Table("from", "to", "bytes", "µs", "GB/s", title="Between ranks")
        for pair in pairs:
            table.add_row(f"{pair.source}", f"{pair.target}", f"{pair.bytes}", f"{pair.us:.1f}", f"{pair.gbps:.3g}")
        console.print(table)
    if waits := waiting(timeline):
        table = Table("rank", "for", "flags", "times", "µs in all", "longest", title="Waiting")
        for wait in waits:
            numbers = f"{wait.flags}", f"{wait.times}", f"{wait.us:.1f}", f"{wait.longest_us:.1f}"
            table.add_row(f"{wait.rank}", wait.what, *numbers)
        console.print(table)
    hiding = overlaps(timeline)
    if any(each.compute_us for each in hiding):
        table = Table("rank", "compute µs", "communication µs", "of it hidden", title="Overlap")
        for each in hiding:
            hidden = f"{each.both_us / each.communication_us:.0%}" if each.communication_us else ""
            table.add_row(f"{each.rank}", f"{each.compute_us:.1f}", f"{each.communication_us:.1f}", hidden)
        console.print(table)
