"""The timeline: the events of all ranks on one clock, and flows from what ended a wait to the wait.

`assemble` makes it from the recordings of all ranks. `chrome`, `summary` and `picture` show it.
"""

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from iris.language.trace_buffer import FORMS, NAMES, WORDS
from iris.language.tracing import SEVERAL
from iris.tracing.common_clock import ClockPath, clock_paths, reference
from iris.tracing.host_clocks import HostClock
from iris.tracing.rank_recording import Recording
from iris.world.rail import Transfer

READS = {"load", "get"}
"""The events whose data come from their target. The data of all others go there."""

RAIL = -1
"""Stands for a program in the events of a rank's rails, which have a row of their own."""

HALVES = {"whole": (0, 32), "high": (32, 32), "low": (0, 32)}
"""Where the count of each form is in its flag: the first bit, and the number of bits."""


@dataclass(slots=True)
class Event:
    """What a program or a rail did, from ``began`` to ``ended``, in microseconds from the first event of all ranks.

    Attributes
    ----------
    rank, program, context : int
        Which rank, program and context it is of. Programs are numbered row by row. Contexts are numbered on each rank
        as programs initialise them; 0 for functional operations. For a rail they are `RAIL` and 0.
    name : str
        One of `iris.language.trace_buffer.NAMES`, or "event 17" for a number without a name. For a rail, the kind of
        transfer.
    form : str
        One of `iris.language.trace_buffer.FORMS`, or "rail".
    target : int or None
        The rank that is accessed, -2 for several; the rank itself for local accesses.
    place : tuple of str and int, or None
        The memory that its address is in, by a name that all ranks share, and the offset in it.
    thing, part : str
        The same for people: a tensor, or what the library uses the memory for, and which part of it. "" where it is not
        known, as for blocks of pointers.
    bytes : int
        The bytes that it moves. For a rail, those sent to other ranks; ``transfer`` has the rest.
    value, seen, after : int
        For a flag: the operand, or the value awaited; what the flag held before the operation, and what after it.
    pid_m, pid_n : int
        The numbers that the kernel gave the event, or else its program ids.
    unfinished : bool
        Whether its end was not recorded.
    transfer : Transfer or None
        What a rail sent and received.
    """

    rank: int
    program: int
    context: int
    name: str
    form: str
    began: float
    ended: float
    target: int | None
    place: tuple[str, int] | None
    thing: str
    part: str
    bytes: int
    value: int
    seen: int
    after: int
    pid_m: int
    pid_n: int
    unfinished: bool = False
    transfer: Transfer | None = None

    @property
    def is_wait(self) -> bool:
        return self.name in ("wait", "barrier") and self.transfer is None

    @property
    def row(self) -> str:
        """The label of its row in a picture, among those of its rank."""
        return f"program {self.program}" if self.transfer is None else "rail"

    @property
    def owner(self) -> int | None:
        """The rank on which the flag is."""
        return self.rank if self.is_wait and self.form != "flag" else self.target


@dataclass
class Timeline:
    """The events, in the order of rank, program and time, and the flows.

    A flow is a pair of indices into the events: what ended a wait, and that wait. By rank: ``devices``; ``lost``, the
    number of events that had no room; ``clock_error`` in microseconds, against the clock of the rank ``reference``; and
    ``hosts``, which is empty if there is only one. ``apart``: ranks whose clocks have not been compared with that of
    the reference. Ranks in one tuple have been compared with each other. Their first event is at 0, and their error is
    infinite.
    """

    events: list[Event]
    flows: list[tuple[int, int]]
    devices: dict[int, str]
    lost: dict[int, int]
    clock_error: dict[int, float] = field(default_factory=dict)
    hosts: dict[int, HostClock] = field(default_factory=dict)
    reference: int = 0
    apart: tuple[tuple[int, ...], ...] = ()

    def of_rank(self, rank: int) -> "Timeline":
        """The events of this rank, and the flows between them."""
        mine = [i for i, event in enumerate(self.events) if event.rank == rank]
        new = {old: i for i, old in enumerate(mine)}
        flows = [(new[a], new[b]) for a, b in self.flows if a in new and b in new]
        device, lost, error = self.devices[rank], self.lost[rank], self.clock_error[rank]
        hosts = {other: host for other, host in self.hosts.items() if other == rank}
        return Timeline(
            [self.events[i] for i in mine],
            flows,
            {rank: device},
            {rank: lost},
            {rank: error},
            hosts,
            self.reference,
            tuple(ranks for ranks in self.apart if rank in ranks),
        )


def assemble(recordings: Sequence[Recording]) -> Timeline:
    """The timeline of these recordings. A rank may have several."""
    events: list[Event] = []
    within: dict[int, float] = defaultdict(float)
    between: dict[int, float] = defaultdict(float)
    lost: dict[int, int] = defaultdict(int)
    by_clock = defaultdict(list)
    for recording, path in zip(recordings, clock_paths(recordings), strict=True):
        by_clock[path.apart].append((recording, path))
    for apart, same in by_clock.items():
        of_clock = [event for each in same for event in (*_read(*each), *_read_rails(*each))]
        origin = min((event.began for event in of_clock), default=0)
        for event in of_clock:
            event.began, event.ended = (event.began - origin) / 1e3, (event.ended - origin) / 1e3
        events += of_clock
        for recording, path in same:
            rank, (in_host, of_hosts) = recording.rank, path.errors(_times(recording))
            within[rank] = max(within[rank], in_host / 1e3)
            between[rank] = max(between[rank], of_hosts / 1e3 if apart is None else math.inf)
            lost[rank] += recording.lost
    events.sort(key=lambda event: (event.rank, event.program, event.began, -event.ended))
    devices = {recording.rank: recording.device for recording in recordings}
    first = reference(recordings)
    hosts: dict[int, HostClock] = {}
    for recording in recordings:
        of_first = recording.host.compared if recording.ranks[0] == first else None
        if recording.rank not in hosts or of_first:
            hosts[recording.rank] = replace(recording.host, compared=of_first)
    if len({host.key for host in hosts.values()}) == 1:
        hosts = {}
    # Flags are signalled only within a host, so errors between hosts do not count here.
    slack = 2 * max(within.values(), default=0.0)
    flows = sorted((*_flows_to_waits(events, slack), *_flows_to_meetings(events)))
    errors = {rank: within[rank] + between[rank] for rank in within}
    apart = tuple(tuple(sorted({each.rank for each, _ in by_clock[end]})) for end in by_clock if end is not None)
    return Timeline(events, flows, devices, dict(lost), errors, hosts, first, apart)


def _times(recording: Recording) -> np.ndarray:
    """The times at which events and transfers began, int64 ns of this rank's clock."""
    return np.concatenate((recording.events.reshape(-1, WORDS.value)[:, 0], recording.transfers[:, 0]))


def _read(recording: Recording, path: ClockPath) -> Iterator[Event]:
    """The events of a recording, with times in ns on the clock to which ``path`` leads."""
    rows = recording.events.reshape(-1, WORDS.value)
    began, ended = (path.convert(rows[:, i]).tolist() for i in (0, 1))
    for row, start, end in zip(rows.tolist(), began, ended, strict=True):
        _, over, name, form, program, target, address, moved, value, seen, after, pid_m, pid_n, looks = row
        space = next((each for each in recording.spaces if 0 <= address - each.base < each.size), None)
        # For a block of pointers the kernel records only where the memory begins (`iris.language.tracing.extent`).
        known = space is not None and address > space.base or FORMS[form] not in ("named", "move")
        thing, part = recording.places.get(address, ("", "")) if known else ("", "")
        yield Event(
            rank=recording.rank,
            program=program & 0xFFFFFFFF,
            context=program >> 32,
            # Several looks at a flag in a row are a wait; a single one is not.
            name="wait" if looks > 1 else NAMES[name] if 0 <= name < len(NAMES) else f"event {name}",
            form=FORMS[form],
            began=start,
            ended=end if over else start,
            target=_world_rank(target, space.ranks if space else recording.ranks),
            place=(space.name, address - space.base) if space else None,
            thing=thing,
            part=part,
            bytes=moved,
            value=value,
            seen=seen,
            after=after,
            pid_m=pid_m,
            pid_n=pid_n,
            unfinished=not over,
        )


def _read_rails(recording: Recording, path: ClockPath) -> Iterator[Event]:
    """The transfers of a recording, as `_read`."""
    rows = recording.transfers
    began, ended = (path.convert(rows[:, i]).tolist() for i in (0, 1))
    for (_, over, number), start, end in zip(rows.tolist(), began, ended, strict=True):
        transfer = recording.described[number]
        peers = {*transfer.targets, *transfer.sources}
        yield Event(
            rank=recording.rank,
            program=RAIL,
            context=0,
            name=transfer.kind,
            form="rail",
            began=start,
            ended=end if over else start,
            target=peers.pop() if len(peers) == 1 else SEVERAL.value,
            place=None,
            thing="",
            part="",
            bytes=sum(transfer.sent),
            value=0,
            seen=0,
            after=0,
            pid_m=0,
            pid_n=0,
            unfinished=not over,
            transfer=transfer,
        )


def _world_rank(target: int, ranks: Sequence[int]) -> int | None:
    """The global rank of ``target``. ``ranks``: the global ranks of the group in which ``target`` is numbered."""
    if target == SEVERAL.value:
        return target
    if target < 0:
        return None
    return ranks[target] if target < len(ranks) else target


def _flows_to_waits(events: Sequence[Event], slack: float) -> Iterator[tuple[int, int]]:
    """From what set a flag to who waited for it. ``slack``: by how much clocks may be wrong, in microseconds."""
    changes: dict[tuple, list[tuple[float, int, int]]] = defaultdict(list)
    for i, event in enumerate(events):
        if event.form == "flag" and event.place is not None:
            if event.name != "wait" or event.after != event.seen:
                changes[event.owner, event.place].append((event.began, event.after, i))
    by_flag = {flag: _Changes(sorted(each)) for flag, each in changes.items()}
    for i, event in enumerate(events):
        flag = by_flag.get((event.owner, event.place))
        if event.name != "wait" or flag is None or event.unfinished:
            continue
        if event.form == "flag":
            cause = flag.last_to(event.seen, event.ended, slack)
        elif event.form in HALVES:
            cause = flag.first_to_reach(event.value, *HALVES[event.form], event.ended + slack)
        else:
            continue
        if cause not in (None, i):
            yield cause, i


class _Changes:
    """The changes of one flag in the order of time: when each began, the new value, and the index of its event."""

    def __init__(self, changes: list[tuple[float, int, int]]) -> None:
        self._changes = changes
        self._to: dict[int, list[tuple[float, int]]] = defaultdict(list)
        for began, value, number in changes:
            self._to[value].append((began, number))
        self._counts: dict[tuple[int, int], list[int]] = {}

    def last_to(self, value: int, end: float, slack: float) -> int | None:
        """The last change to this value before ``end``; else the first one after it, by ``slack`` at most."""
        to = self._to.get(value, [])
        before = bisect_right(to, end, key=lambda change: change[0])
        if before:
            return to[before - 1][1]
        return to[0][1] if to and to[0][0] <= end + slack else None

    def first_to_reach(self, wanted: int, shift: int, bits: int, end: float) -> int | None:
        """The change before ``end`` that raised the count to ``wanted`` or past it; None if it was there before."""
        if (shift, bits) not in self._counts:
            self._counts[shift, bits] = self._highest(shift, bits)
        highest, half = self._counts[shift, bits], 1 << bits - 1
        if not highest:
            return None
        # Counts wrap. Of all numbers that ``wanted`` may stand for, take the nearest to the first count.
        target = highest[0] + (wanted - highest[0] + half) % (2 * half) - half
        first = bisect_left(highest, target)
        # The count before the first recorded change was lower by at least one.
        if first == len(highest) or (first == 0 and highest[0] - 1 >= target):
            return None
        began, _, number = self._changes[first]
        return number if began <= end else None

    def _highest(self, shift: int, bits: int) -> list[int]:
        """The highest count up to each change, as if counts did not wrap."""
        half = 1 << bits - 1
        highest: list[int] = []
        for _, value, _ in self._changes:
            last = highest[-1] if highest else value >> shift
            now = last + ((value >> shift) - last + half) % (2 * half) - half
            highest.append(max(last, now))
        return highest


def _flows_to_meetings(events: Sequence[Event]) -> Iterator[tuple[int, int]]:
    """In each barrier, from the rank that came last to all others."""
    meetings: dict[tuple, list[int]] = defaultdict(list)
    for i, event in enumerate(events):
        if event.form == "meeting" and event.place is not None:
            meetings[event.place, event.program, event.after].append(i)
    for same in meetings.values():
        # Epochs start again where flags do (another tensor at the same place). A rank is in a barrier only once, so its
        # second event belongs to the next barrier.
        met: dict[int, int] = {}
        for i in sorted(same, key=lambda i: events[i].began):
            if events[i].rank in met:
                yield from _to_all_others(events, met)
                met = {}
            met[events[i].rank] = i
        yield from _to_all_others(events, met)


def _to_all_others(events: Sequence[Event], met: dict[int, int]) -> Iterator[tuple[int, int]]:
    last = max(met, key=lambda rank: events[met[rank]].began)
    yield from ((met[last], i) for rank, i in met.items() if rank != last)


def tracks(events: Sequence[Event]) -> list[int]:
    """The track of each event of one program, in the order of time. Two events of a track never overlap in part.

    Kernels that run at the same time have tracks of their own, and so have concurrent partitions of one.
    """
    by_context: dict[int, list[int]] = defaultdict(list)
    for i, event in enumerate(events):
        by_context[event.context].append(i)
    chosen = [0] * len(events)
    over: list[float] = []
    for indices in by_context.values():
        mine = _nested([events[i] for i in indices])
        begin, end, width = events[indices[0]].began, max(events[i].ended for i in indices), 1 + max(mine)
        first = next(n for n in range(len(over) + 1) if all(free <= begin for free in over[n : n + width]))
        over[first : first + width] = [end] * width
        for i, track in zip(indices, mine, strict=True):
            chosen[i] = first + track
    return chosen


def _nested(events: Sequence[Event]) -> list[int]:
    """As `tracks`, for events of one context."""
    open_ends: list[list[float]] = []
    chosen = []
    for event in events:
        for ends in open_ends:
            while ends and ends[-1] <= event.began:
                ends.pop()
        fits = (number for number, ends in enumerate(open_ends) if not ends or event.ended <= ends[-1])
        number = next(fits, len(open_ends))
        if number == len(open_ends):
            open_ends.append([])
        open_ends[number].append(event.ended)
        chosen.append(number)
    return chosen


def merge_spans(spans: Iterable[tuple[float, float]]) -> np.ndarray:
    """The union of spans of time, as ``[n, 2]`` in order."""
    ordered = np.array(sorted(spans), dtype=np.float64).reshape(-1, 2)
    if not len(ordered):
        return ordered
    latest = np.maximum.accumulate(ordered[:, 1])
    begins = np.concatenate(([True], ordered[1:, 0] > latest[:-1]))
    ends = np.concatenate((begins[1:], [True]))
    return np.stack((ordered[begins, 0], latest[ends]), axis=1)


def length(union: np.ndarray) -> float:
    return float((union[:, 1] - union[:, 0]).sum())


def overlap(a: np.ndarray, b: np.ndarray) -> float:
    """How long both unions of spans last at the same time."""
    return length(a) + length(b) - length(merge_spans((*map(tuple, a), *map(tuple, b))))
