"""Writes a timeline in Chrome's "Trace Event Format" (JSON), which Perfetto opens: https://ui.perfetto.dev.

A rank is a process of the format, and a program a thread. A program that does several things at a time has several
threads. An event is a complete event ("X"). A flow is two events ("s" and "f"), which belong to the events that they
lie within ("Flow Events"). It leads from the begin of what ended a wait to that wait. If the wait had begun before, it
leads to an extra event within the wait, "arrival", as Perfetto shows no flow back in time. Times are microseconds.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from iris.commands.files import written
from iris.tracing.timeline import RAIL, Event, Timeline, tracks
from iris.world.rail import Transfer

# Numbers of threads that each program has for itself: for so many things at a time.
TRACKS = 64
# The first thread of a rank's rails, after those of all programs.
RAIL_THREADS = 1 << 30

_SORTED_FIRST = {"args": {"sort_index": -1}}
CATEGORIES = {"compute": "compute", "wait": "wait", "barrier": "wait", "signal": "signal"}


def write(timeline: Timeline, path: Path) -> None:
    """``path`` becomes a file that https://ui.perfetto.dev opens."""
    with written(path), open(path, "w") as file:
        file.write(f'{{"displayTimeUnit": "ns",\n"otherData": {json.dumps(_about(timeline))},\n"traceEvents": [')
        # Record by record: all of them in one text would be hundreds of megabytes.
        for number, record in enumerate(_records(timeline)):
            file.write(f"{',' if number else ''}\n{json.dumps(record)}")
        file.write("\n]}\n")


def _about(timeline: Timeline) -> dict:
    return {
        "source": "Iris",
        "clock": f"rank {timeline.reference}'s, from the first event of all ranks",
        # JSON knows no infinity.
        "clock_error_us": {rank: error if error < math.inf else None for rank, error in timeline.clock_error.items()},
        "events_lost": timeline.lost,
        **({"clocks_not_compared": timeline.apart} if timeline.apart else {}),
        **({"hosts": _hosts(timeline)} if timeline.hosts else {}),
    }


def _hosts(timeline: Timeline) -> list[dict]:
    """By how much the clock of each host was ahead of the first one's, when recording began and when it ended.

    Hosts are in the order of their first ranks. The lists are empty where the clocks have not been compared.
    """
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(timeline.hosts):
        ranks_of[timeline.hosts[rank].key].append(rank)
    found = []
    for ranks in ranks_of.values():
        hosts = [timeline.hosts[rank] for rank in ranks]
        compared = next((host.compared for host in hosts if host.compared), ())
        found.append(
            {
                "name": hosts[0].name,
                "ranks": ranks,
                "clock_ahead_us": [each.ahead_ns / 1e3 for each in compared],
                "clock_error_us": [each.error_ns / 1e3 for each in compared],
            }
        )
    return found


def _records(timeline: Timeline) -> Iterator[dict]:
    """All records of the file: names of processes and threads, then events, then flows."""
    threads = []
    for rank, device in sorted(timeline.devices.items()):
        host = f" on {timeline.hosts[rank].name}" if rank in timeline.hosts else ""
        yield _name("process_name", f"rank {rank} ({device}{host})", rank)
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
    for (rank, program), group in groupby(timeline.events, lambda event: (event.rank, event.program)):
        events = list(group)
        chosen, first = tracks(events), RAIL_THREADS if program == RAIL else program * TRACKS
        threads += [first + track for track in chosen]
        for track in sorted(set(chosen)):
            also = f", also ({track})" if track else ""
            yield _name("thread_name", f"{events[0].row}{also}", rank, first + track)
            if program == RAIL:
                yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": first + track} | _SORTED_FIRST
    for event, thread in zip(timeline.events, threads, strict=True):
        yield _slice(event, thread)
    for number, (cause, effect) in enumerate(timeline.flows):
        one, other = timeline.events[cause], timeline.events[effect]
        begin, end = max(one.began, other.began), max(other.ended, other.began)
        begin = min(begin, end)
        if begin > other.began:
            yield _arrival(begin, end, other, threads[effect])
        flow = {"name": "ends", "cat": "flow", "id": number}
        yield flow | {"ph": "s", "pid": one.rank, "tid": threads[cause], "ts": _us(one.began)}
        yield flow | {"ph": "f", "bp": "e", "pid": other.rank, "tid": threads[effect], "ts": _us(begin)}


def _arrival(begin: float, end: float, wait: Event, thread: int) -> dict:
    """The last part of a wait, while what ended it was on its way. It begins late enough for a flow to lead there."""
    return {
        "ph": "X",
        "name": "arrival",
        "cat": "arrival",
        "pid": wait.rank,
        "tid": thread,
        "ts": _us(begin),
        "dur": round(_us(end) - _us(begin), 3),
    }


def _name(kind: str, name: str, pid: int, tid: int | None = None) -> dict:
    return {"ph": "M", "name": kind, "pid": pid, "args": {"name": name}} | ({} if tid is None else {"tid": tid})


def _us(time: float) -> float:
    return round(time, 3)


def _category(event: Event) -> str:
    if event.transfer is not None:
        return "rail"
    return CATEGORIES.get(event.name, "event" if event.target is None else "move")


def _of_transfer(transfer: Transfer) -> dict:
    """What is shown of a transfer. Bytes are one number if they are the same for all ranks."""
    found: dict = {"part of": transfer.call}
    for way, ranks, nbytes in (
        ("to", transfer.targets, transfer.sent),
        ("from", transfer.sources, transfer.received),
    ):
        if ranks:
            found |= {f"{way} ranks": ranks, f"bytes {way} each": nbytes[0] if len(set(nbytes)) == 1 else nbytes}
    return found


def _slice(event: Event, thread: int) -> dict:
    """The record of an event."""
    arguments: dict = {"pid_m": event.pid_m, "pid_n": event.pid_n}
    if event.transfer is not None:
        arguments = _of_transfer(event.transfer)
    elif event.target is not None:
        arguments["target"] = "several ranks" if event.target < 0 else f"rank {event.target}"
        arguments["bytes"] = event.bytes
    if event.thing:
        arguments["address"] = f"{event.thing}, {event.part}"
    if event.form not in ("named", "move", "data", "rail"):
        arguments |= {"value": event.value, "seen": event.seen, "after": event.after}
    if event.unfinished:
        arguments["unfinished"] = True
    return {
        "ph": "X",
        "name": event.name,
        "cat": _category(event),
        "pid": event.rank,
        "tid": thread,
        "ts": _us(event.began),
        "dur": round(_us(event.ended) - _us(event.began), 3),
        "args": arguments,
    }
