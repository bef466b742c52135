"""The findings, from the event logs of all ranks: goes through all events in an order in which they could have been.

1. Events of one rank keep their order.
2. What orders ranks (atomic operations and the like) comes by its ``number``. So a release comes before its acquire.
3. The end of a collective comes after all of its ranks have entered.

Plain accesses have no numbers, and need none: whether two of them are ordered does not depend on which one is seen
first. `Races` compares them.

Each program, partition, asynchronous operation and thread of a host is a `Thread` with a vector clock (`clocks`). Here
the clocks are joined as launches, collectives, fences, mbarriers and locks ask for; `Races` joins them for flags.
"""

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from iris.sanitizer import clocks
from iris.sanitizer.clocks import Epoch, Operation, Thread
from iris.sanitizer.deadlock import DeadlockMonitor
from iris.sanitizer.event_log import read_events
from iris.sanitizer.events import (
    PRIVATE,
    Accessed,
    Allocated,
    Awaited,
    Awaiting,
    CollectiveDone,
    CollectiveEnter,
    CtaSynced,
    Diagnostic,
    Fenced,
    Finished,
    Forked,
    HostAcquire,
    HostRelease,
    Issued,
    Joined,
    Known,
    Launched,
    MbarrierArrive,
    MbarrierWait,
    Place,
    ProxyFenced,
    Renewed,
    SharedRace,
    Synchronised,
    Waiting,
)
from iris.sanitizer.findings import Finding, Findings
from iris.sanitizer.flags import Guarantees
from iris.sanitizer.races import Races

# Passes over the event logs, at most. A pass without the edges that were luck (`flags`) may find further ones.
MOST_PASSES = 4


class Rank:
    """One rank's event log, as far as it has been gone through."""

    def __init__(self, number: int, events: Iterator[Any]) -> None:
        self.number, self.events = number, events
        self.places: dict[int, Place] = {}
        # The event that it has come to, if that waits for its turn among those of other ranks.
        self.next: Any = None
        self.ended = False
        # The collective for which its host waits.
        self.awaiting: Awaiting | None = None
        # By launch: its programs, the clock with which they begin, and its event.
        self.programs: dict[int, dict[int, Thread]] = defaultdict(dict)
        self.start_clocks: dict[int, Any] = {}
        self.launches: dict[int, Launched] = {}
        # By launch: the latest asynchronous operation of each slot; and by program, a number for each `Issued.key`.
        self.operations: dict[int, dict[int, Operation]] = defaultdict(dict)
        self.kinds: dict[int, dict[int, dict[int | None, int]]] = defaultdict(lambda: defaultdict(dict))


class Analysis:
    """One pass over the event logs.

    ``logs``: the events of each rank. ``deadlocked``: they end where nobody could go on any more. ``guarantees``: what
    earlier passes have found.
    """

    def __init__(
        self, logs: Mapping[int, Iterable[Any]], deadlocked: bool = False, guarantees: Guarantees | None = None
    ) -> None:
        self._deadlocked = deadlocked
        self._ranks = {number: Rank(number, iter(events)) for number, events in sorted(logs.items())}
        # The clocks' slots, each with the last tick that was used there.
        self._slots: dict[tuple[int, int, int], int] = {}
        self._ticks: dict[int, int] = defaultdict(int)
        # By collective or message: the clocks with which hosts have entered or sent; and how many ranks are done.
        self._entered: dict[tuple, dict[int, np.ndarray]] = defaultdict(dict)
        self._done: dict[tuple, int] = defaultdict(int)
        # What was released into each lock, event, queue and the like of a host, and by arrivals into each mbarrier. Of
        # mbarriers, also what was when their latest phase ended: that is what a wait acquires.
        self._released: dict[tuple, np.ndarray] = defaultdict(clocks.empty)
        self._finished_phases: dict[tuple, np.ndarray] = defaultdict(clocks.empty)
        self._findings = Findings()
        self._races = Races(self._findings, guarantees or Guarantees())
        self._hosts: dict[tuple[int, int], Thread] = {}

    def run(self) -> list[Finding]:
        while self._step():
            pass
        if self._deadlocked:
            self._report_waiting()
        return self._findings.all()

    def lucky_looks(self) -> dict[Epoch, frozenset[Epoch]]:
        """See `flags`."""
        return self._races.lucky_looks()

    def _step(self) -> bool:
        """Go on to the next event that orders ranks, and past it; False at the end of all event logs."""
        for rank in self._ranks.values():
            if rank.next is None and not rank.ended:
                self._advance(rank)
        waiting = [rank for rank in self._ranks.values() if isinstance(rank.next, CollectiveDone)]
        # Ranks whose collective is complete come first: their next event may have a smaller number than all others.
        ready = [rank for rank in waiting if self._entered[rank.next.key].keys() >= set(rank.next.ranks)]
        numbered = [rank for rank in self._ranks.values() if isinstance(rank.next, (Accessed, Synchronised))]
        if numbered and not ready:
            rank = min(numbered, key=lambda rank: rank.next.number)
            event, rank.next = rank.next, None
            self._access(rank, event)
            return True
        # If none is ready, a rank was killed before it entered, and the others go on without it.
        for rank in ready or waiting:
            self._finish_collective(rank)
        return bool(waiting)

    def _finish_collective(self, rank: Rank) -> None:
        done, rank.next, rank.awaiting = rank.next, None, None
        host = self._host(rank, done.thread)
        for number in done.ranks:
            # If the rank was killed before it entered, it adds nothing.
            host.join(self._entered[done.key].get(number, host.clock))
        host.advance()
        self._done[done.key] += 1
        if self._done[done.key] == done.receivers:
            del self._entered[done.key], self._done[done.key]

    def _report_waiting(self) -> None:
        for rank in self._ranks.values():
            if (awaiting := rank.awaiting) is not None and not awaiting.last:
                missing = set(awaiting.ranks) - self._entered[awaiting.key].keys()
                if missing or not awaiting.ranks:
                    others = " and ".join(f"rank {number}" for number in sorted(missing)) or "nobody"
                    text = f"waits in {awaiting.text}, to which {others} {'did not come' if missing else 'came'}"
                    waiting = Waiting(None, "the host", text, rank.places[awaiting.place], "")
                    self._findings.add_waiting(rank.number, waiting)

    def _advance(self, rank: Rank) -> None:
        """Apply the rank's events up to the next one that has to wait for its turn."""
        for event in rank.events:
            if isinstance(event, (Synchronised, CollectiveDone)) or (
                isinstance(event, Accessed) and event.number is not None
            ):
                rank.next = event
                return
            self._apply(rank, event)
        rank.ended = True

    def _access(self, rank: Rank, event: Accessed | Synchronised) -> None:
        thread, place = self._thread(rank, event.launch, event.program), rank.places[event.place]
        if isinstance(event, Synchronised):
            self._races.synchronised(thread, place, event)
        else:
            self._races.accessed(thread, place, event)

    def _apply(self, rank: Rank, event: Any) -> None:
        match event:
            case Known(number, place):
                rank.places[number] = place
            case CollectiveEnter(key, last, number):
                host = self._host(rank, number)
                if not last:
                    self._entered[key][rank.number] = host.clock
                host.advance()
            case HostRelease(number, key):
                host = self._host(rank, number)
                self._released[rank.number, key] = clocks.joined(self._released[rank.number, key], host.clock)
                host.advance()
            case HostAcquire(number, key):
                self._host(rank, number).join(self._released[rank.number, key])
            case Renewed(spans):
                self._races.forget(spans)
            case Awaiting():
                rank.awaiting = event
            case Accessed():
                self._access(rank, event)
            case Allocated(spans, text, place, undefined, new):
                # A kernel's argument is no new memory if a launch that still runs has it, too.
                in_use = spans.space[0] == PRIVATE and rank.start_clocks and self._findings.has_allocation(spans)
                self._findings.allocated(spans, text, rank.places[place], undefined)
                if new and not in_use:
                    self._races.forget(spans)
            case Launched(launch, _, number):
                host = self._host(rank, number)
                rank.launches[launch] = event
                rank.start_clocks[launch] = clocks.after_proxy_fence(host.clock)
                host.advance()
            case Finished(launch, number):
                host = self._host(rank, number)
                # Asynchronous operations for which no program has waited have ended, too.
                threads = [*rank.programs.pop(launch, {}).values(), *rank.operations.pop(launch, {}).values()]
                for thread in threads:
                    host.join(thread.end_clock())
                    self._ticks[thread.slot] = max(self._ticks[thread.slot], thread.tick)
                rank.start_clocks.pop(launch, None)
                rank.launches.pop(launch, None)
                rank.kinds.pop(launch, None)
                host.advance()
            case CtaSynced(launch, program):
                self._thread(rank, launch, program).cta_sync()
            case Forked(launch, program, partitions):
                parent = self._thread(rank, launch, program)
                for partition in partitions:
                    self._thread(rank, launch, partition).join(parent.clock)
                parent.advance()
            case Joined(launch, program, partitions):
                for partition in partitions:
                    child = self._thread(rank, launch, partition)
                    self._thread(rank, launch, program).join(child.clock)
                    child.advance()
            case Issued(launch, program, operation, key):
                rank.programs[launch][operation] = self._new_operation(rank, launch, program, key)
            case Awaited(launch, program, operation):
                ended = rank.programs[launch].pop(operation)
                self._thread(rank, launch, program).join(ended.end_clock())
            case SharedRace():
                places = [rank.places[place] for _, _, place in (event.first, event.second)]
                self._findings.add_shared_race(rank.number, event, *places)
            case MbarrierArrive(launch, program, key, ends):
                thread, key = self._thread(rank, launch, program), (rank.number, launch, *key)
                self._released[key] = clocks.joined(self._released[key], thread.end_clock())
                thread.advance()
                if program < 0:
                    del rank.programs[launch][program]
                if ends:
                    self._finished_phases[key] = self._released[key]
            case MbarrierWait(launch, program, key):
                self._thread(rank, launch, program).join(self._finished_phases[(rank.number, launch) + key])
            case Fenced(launch, program):
                self._thread(rank, launch, program).fence()
            case ProxyFenced(launch, program):
                self._thread(rank, launch, program).proxy_fence()
            case Diagnostic(place=place):
                self._findings.add_diagnostic(rank.number, event, None if place is None else rank.places[place])
            case Waiting():
                self._findings.add_waiting(rank.number, event)

    # Threads --------------------------------------------------------------------------------------------------------

    def _host(self, rank: Rank, number: int) -> Thread:
        """The thread of Python of this number, in the rank's process."""
        if (rank.number, number) not in self._hosts:
            self._hosts[rank.number, number] = self._new_thread(rank.number, -number, clocks.empty())
        return self._hosts[rank.number, number]

    def _new_thread(self, rank: int, program: int, clock: Any, taken: Collection[int] = (), text: str = "") -> Thread:
        """A thread that begins with ``clock``, in a slot that nobody uses. ``text``: the program, in words.

        Programs of the same number share a slot if their launches are ordered. ``taken``: the slots of those programs
        of this number whose launches are under way. The slot of one that has ended is free only if ``clock`` comes
        after all of it: the launches may be unordered, and one may have ended before the other began by chance.
        """
        for attempt in itertools.count():
            slot = self._slots.setdefault((rank, program, attempt), len(self._slots))
            known = clock[clocks.AS_WRITTEN, slot] if slot < clock.shape[1] else 0
            if slot not in taken and known >= self._ticks[slot]:
                break
        return Thread(rank, slot, self._ticks[slot] + 1, clock, text)

    def _new_operation(self, rank: Rank, launch: int, program: int, key: int | None) -> Operation:
        issuer, operations = self._thread(rank, launch, program), rank.operations[launch]
        # Slots are told apart by the order of keys, as the keys, addresses of mbarriers, differ from run to run.
        kinds = rank.kinds[launch][program]
        kind = kinds.setdefault(key, len(kinds))
        slot = self._slots.setdefault((rank.number, issuer.slot, -1 - kind), len(self._slots))
        self._ticks[slot] += 1
        operations[slot] = Operation(issuer, slot, self._ticks[slot])
        issuer.advance()
        return operations[slot]

    def _thread(self, rank: Rank, launch: int, program: int) -> Thread:
        """That of a program, partition or asynchronous operation, or of the host if the launch is 0."""
        if launch == 0:
            return self._host(rank, program)
        programs = rank.programs[launch]
        if program not in programs:
            taken = [others[program].slot for others in rank.programs.values() if program in others]
            base = rank.start_clocks.get(launch, clocks.empty())
            text = rank.launches[launch].program_text(program) if launch in rank.launches else ""
            programs[program] = self._new_thread(rank.number, program, base, taken, text)
        return programs[program]


def analyse(folder: Path) -> list[Finding]:
    """What is wrong in the launch whose ranks have their event logs in ``folder``."""
    deadlocked, guarantees = DeadlockMonitor(folder).is_deadlocked(), Guarantees()
    for _ in range(MOST_PASSES):
        analysis = Analysis(read_events(folder), deadlocked, guarantees)
        findings = analysis.run()
        if not guarantees.add(analysis.lucky_looks()):
            break
    return findings
