"""From the notes of all ranks to what is wrong.

The notes are gone through in an order in which they could have been made: each rank's as they stand, what orders ranks
by its number, and after a meeting of hosts only when all have come to it. So a release is seen before what acquires
it. Accesses to data have no numbers and need none: whether two of them are ordered does not depend on which of them is
looked at first: `Races` compares them.

What is followed here is who knows of whom: each program and each host is a `Thread` with its clock, which goes on at
launches, meetings, fences and the mbarriers of partitions.
"""

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from iris.sanitizer import clocks
from iris.sanitizer.clocks import Operation, Thread
from iris.sanitizer.deadlock import Onlooker
from iris.sanitizer.events import (
    PRIVATE,
    Accessed,
    Allocated,
    Awaited,
    Awaiting,
    CollectiveDone,
    CollectiveEnter,
    Diagnostic,
    Fenced,
    Finished,
    Forked,
    Gathered,
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
from iris.sanitizer.flags import Moment, Verdicts
from iris.sanitizer.notes import notes_in
from iris.sanitizer.races import Races

# The notes are gone through so often at most: what is not known by luck any more may show more that is.
TIMES = 4


class Rank:
    """One rank's notes, as far as they have been gone through."""

    def __init__(self, number: int, events: Iterator[Any]) -> None:
        self.number, self.events = number, events
        self.places: dict[int, Place] = {}
        self.next: Any = None
        self.over = False
        self.awaiting: Awaiting | None = None
        self.programs: dict[int, dict[int, Thread]] = defaultdict(dict)
        self.bases: dict[int, Any] = {}
        self.launches: dict[int, Launched] = {}
        # By launch: the latest operation of each slot; and of each program, which kinds of them it has issued.
        self.operations: dict[int, dict[int, Operation]] = defaultdict(dict)
        self.kinds: dict[int, dict[int, dict[int | None, int]]] = defaultdict(lambda: defaultdict(dict))


class Analysis:
    """Goes through the notes once. ``over``: they end where nobody could go on any more."""

    def __init__(
        self, notes: Mapping[int, Iterable[Any]], over: bool = False, verdicts: Verdicts | None = None
    ) -> None:
        self._over = over
        self._ranks = {number: Rank(number, iter(events)) for number, events in sorted(notes.items())}
        self._slots: dict[tuple[int, int, int], int] = {}
        self._ticks: dict[int, int] = defaultdict(int)
        # What the hosts knew that have entered a collective, or sent a message; and how many are done with it.
        self._entered: dict[tuple, dict[int, np.ndarray]] = defaultdict(dict)
        self._done: dict[tuple, int] = defaultdict(int)
        # What the host's threads have released into each thing, and arrivals into each mbarrier; of the arrivals,
        # what those have whose phases are over.
        self._released: dict[tuple, np.ndarray] = defaultdict(clocks.empty)
        self._over_phases: dict[tuple, np.ndarray] = defaultdict(clocks.empty)
        self._findings = Findings()
        self._races = Races(self._findings, verdicts or Verdicts())
        self._hosts: dict[tuple[int, int], Thread] = {}

    def run(self) -> list[Finding]:
        while self._step():
            pass
        if self._over:
            self._report_waiting()
        return self._findings.sorted()

    def luck(self) -> dict[Moment, frozenset[Moment]]:
        """Looks at flags that have seen what they may not count on, see `flags`."""
        return self._races.luck()

    def _step(self) -> bool:
        """Go on to the next event that orders ranks, and past it; False at the end of all notes."""
        for rank in self._ranks.values():
            if rank.next is None and not rank.over:
                self._advance(rank)
        waiting = [rank for rank in self._ranks.values() if isinstance(rank.next, CollectiveDone)]
        # Those who need not wait come first: what they do next may have a smaller number than anything else.
        ready = [rank for rank in waiting if self._entered[rank.next.key].keys() >= set(rank.next.ranks)]
        numbered = [rank for rank in self._ranks.values() if isinstance(rank.next, (Accessed, Synchronised))]
        if numbered and not ready:
            rank = min(numbered, key=lambda rank: rank.next.number)
            event, rank.next = rank.next, None
            self._access(rank, event)
            return True
        # If the notes of a rank end before, as it was ended, the others go on without it.
        for rank in ready or waiting:
            self._finish_collective(rank)
        return bool(waiting)

    def _finish_collective(self, rank: Rank) -> None:
        done, rank.next, rank.awaiting = rank.next, None, None
        host = self._host(rank, done.thread)
        for number in done.ranks:
            # If the notes of a rank end before, it has not come.
            host.learn(self._entered[done.key].get(number, host.clock))
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
        for event in rank.events:
            if isinstance(event, (Synchronised, CollectiveDone)) or (
                isinstance(event, Accessed) and event.number is not None
            ):
                rank.next = event
                return
            self._take(rank, event)
        rank.over = True

    def _access(self, rank: Rank, event: Accessed | Synchronised) -> None:
        thread, place = self._who(rank, event.launch, event.program), rank.places[event.place]
        if isinstance(event, Synchronised):
            self._races.synchronised(thread, place, event)
        else:
            self._races.accessed(thread, place, event)

    def _take(self, rank: Rank, event: Any) -> None:
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
                self._host(rank, number).learn(self._released[rank.number, key])
            case Renewed(spans):
                self._races.forget(spans)
            case Awaiting():
                rank.awaiting = event
            case Accessed():
                self._access(rank, event)
            case Allocated(spans, text, place, undefined, new):
                # An argument may have been given to a launch, too, that still runs.
                in_use = spans.space[0] == PRIVATE and rank.bases and self._findings.knows(spans)
                self._findings.allocated(spans, text, rank.places[place], undefined)
                if new and not in_use:
                    self._races.forget(spans)
            case Launched(launch, _, number):
                host = self._host(rank, number)
                rank.launches[launch] = event
                rank.bases[launch] = clocks.fenced(host.clock)
                host.advance()
            case Finished(launch, number):
                host = self._host(rank, number)
                # What has been issued and not awaited is over, too.
                threads = [*rank.programs.pop(launch, {}).values(), *rank.operations.pop(launch, {}).values()]
                for thread in threads:
                    host.learn(thread.knowledge())
                    self._ticks[thread.slot] = max(self._ticks[thread.slot], thread.tick)
                rank.bases.pop(launch, None)
                rank.launches.pop(launch, None)
                rank.kinds.pop(launch, None)
                host.advance()
            case Gathered(launch, program):
                self._who(rank, launch, program).gather()
            case Forked(launch, program, partitions):
                parent = self._who(rank, launch, program)
                for partition in partitions:
                    self._who(rank, launch, partition).learn(parent.clock)
                parent.advance()
            case Joined(launch, program, partitions):
                for partition in partitions:
                    child = self._who(rank, launch, partition)
                    self._who(rank, launch, program).learn(child.clock)
                    child.advance()
            case Issued(launch, program, operation, key):
                rank.programs[launch][operation] = self._operation(rank, launch, program, key)
            case Awaited(launch, program, operation):
                over = rank.programs[launch].pop(operation)
                self._who(rank, launch, program).learn(over.knowledge())
            case SharedRace():
                places = [rank.places[place] for _, _, place in (event.first, event.second)]
                self._findings.add_shared_race(rank.number, event, *places)
            case MbarrierArrive(launch, program, key, ends):
                thread, key = self._who(rank, launch, program), (rank.number, launch, *key)
                self._released[key] = clocks.joined(self._released[key], thread.knowledge())
                thread.advance()
                if program < 0:
                    del rank.programs[launch][program]
                if ends:
                    self._over_phases[key] = self._released[key]
            case MbarrierWait(launch, program, key):
                self._who(rank, launch, program).learn(self._over_phases[(rank.number, launch) + key])
            case Fenced(launch, program):
                self._who(rank, launch, program).fence()
            case ProxyFenced(launch, program):
                self._who(rank, launch, program).fence_proxies()
            case Diagnostic(place=place):
                self._findings.add_diagnostic(rank.number, event, None if place is None else rank.places[place])
            case Waiting():
                self._findings.add_waiting(rank.number, event)

    # Who ------------------------------------------------------------------------------------------------------------

    def _host(self, rank: Rank, number: int) -> Thread:
        """One of its threads of Python."""
        if (rank.number, number) not in self._hosts:
            self._hosts[rank.number, number] = self._thread(rank.number, -number, clocks.empty())
        return self._hosts[rank.number, number]

    def _thread(self, rank: int, program: int, clock: Any, taken: Collection[int] = (), text: str = "") -> Thread:
        """``taken``: the slots of programs of this number in launches that run beside this one's.

        A slot also stays with those that are over as long as ``clock`` does not know of them: threads of the host that
        launch in no order may do so one after the other this time. ``text``: the program, in words.
        """
        for beside in itertools.count():
            slot = self._slots.setdefault((rank, program, beside), len(self._slots))
            known = clock[clocks.AS_WRITTEN, slot] if slot < clock.shape[1] else 0
            if slot not in taken and known >= self._ticks[slot]:
                break
        return Thread(rank, slot, self._ticks[slot] + 1, clock, text)

    def _operation(self, rank: Rank, launch: int, program: int, key: int | None) -> Operation:
        issuer, operations = self._who(rank, launch, program), rank.operations[launch]
        # Addresses differ from one run to the next; the slots are the same.
        kinds = rank.kinds[launch][program]
        kind = kinds.setdefault(key, len(kinds))
        slot = self._slots.setdefault((rank.number, issuer.slot, -1 - kind), len(self._slots))
        self._ticks[slot] += 1
        operations[slot] = Operation(issuer, slot, self._ticks[slot])
        issuer.advance()
        return operations[slot]

    def _who(self, rank: Rank, launch: int, program: int) -> Thread:
        if launch == 0:
            return self._host(rank, program)
        programs = rank.programs[launch]
        if program not in programs:
            taken = [others[program].slot for others in rank.programs.values() if program in others]
            base = rank.bases.get(launch, clocks.empty())
            text = rank.launches[launch].program_text(program) if launch in rank.launches else ""
            programs[program] = self._thread(rank.number, program, base, taken, text)
        return programs[program]


def analyse(folder: Path) -> list[Finding]:
    """What is wrong in the launch whose ranks have noted what they did in ``folder``."""
    over, verdicts = Onlooker(folder).is_over(), Verdicts()
    for _ in range(TIMES):
        analysis = Analysis(notes_in(folder), over, verdicts)
        findings = analysis.run()
        if not verdicts.learn(analysis.luck()):
            break
    return findings
