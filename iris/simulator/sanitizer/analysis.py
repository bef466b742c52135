"""From the notes of all ranks to what is wrong.

The notes are gone through in an order in which they could have been made: each rank's as they stand, what orders ranks
by its number, and behind a meeting of hosts only when all have come to it. So a release is seen before what acquires
it. Accesses to data have no numbers and need none: whether two of them are ordered does not depend on which of them is
looked at first.
"""

import pickle
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from iris.simulator.sanitizer import clocks, shadow
from iris.simulator.sanitizer.clocks import Released, Thread
from iris.simulator.sanitizer.deadlock import Onlooker
from iris.simulator.sanitizer.events import (
    HOST,
    PRIVATE,
    READ,
    UPDATE,
    WRITE,
    Accessed,
    Allocated,
    Awaiting,
    Came,
    Fenced,
    Finished,
    Forked,
    Gathered,
    Heard,
    Joined,
    Known,
    Launched,
    Line,
    Met,
    Place,
    ProxyFenced,
    Spans,
    Synchronised,
    Told,
    Waiting,
    Wrong,
)
from iris.simulator.sanitizer.findings import LOST, Finding, Findings, Side
from iris.simulator.sanitizer.waits import Flag

# A plain store of so many bytes at most may be meant as a flag.
FLAG_BYTES = 8

# What a race is for want of, by the first of the clocks in which it would be none.
CAUSES = {
    clocks.ANY_SCOPE: "race/scope",
    clocks.ALL_RELEASE: "race/missing-release",
    clocks.ALL_ACQUIRE: "race/missing-acquire",
    clocks.BOTH: "race/missing-release",
}


class Access(NamedTuple):
    """What the shadow's numbers stand for.

    ``atomic``: at which scope it is, or nothing. ``blank``: the host's zeros. ``flag``: a kernel's access to so few
    bytes that they may be meant as one. ``before``: the write that this one wrote over; of a read, the first one by the
    same program of what was there then. ``readers``: of a write, the set of those who had read what it wrote over.
    ``stale``: the program's last wait told it nothing new. ``async_proxy``: by TMA.
    """

    thread_slot: int
    tick: int
    rank: int
    place: Place
    kind: int
    atomic: str
    host: bool
    blank: bool
    flag: bool
    before: int
    readers: int = 0
    stale: bool = False
    async_proxy: bool = False


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


class Analysis:
    """Goes through the notes once. ``over``: they end where nobody could go on any more."""

    def __init__(self, notes: "dict[int, Iterable[Any]]", over: bool = False) -> None:
        self._over = over
        self._ranks = {number: Rank(number, iter(events)) for number, events in sorted(notes.items())}
        self._slots: dict[tuple[int, int, int], int] = {}
        self._ticks: dict[int, int] = defaultdict(int)
        self._shadow = shadow.Shadow()
        nothing = Place(None, Line("?", 0, "?"))
        self._accesses = [Access(0, 0, -1, nothing, WRITE, atomic="", host=True, blank=True, flag=False, before=0)]
        self._numbers: dict[Access, int] = {}
        self._sets: list[tuple[int, ...]] = [()]
        self._set_numbers: dict[tuple[int, ...], int] = {(): 0}
        self._released: dict[int, Released] = {}
        self._holders: dict[int, int] = defaultdict(int)
        self._flags: dict[tuple, Flag] = {}
        # What the hosts knew that have come to a meeting, or sent a message; and how many have gone on from there.
        self._came: dict[tuple, dict[int, np.ndarray]] = defaultdict(dict)
        self._gone_on: dict[tuple, int] = defaultdict(int)
        # What those knew who have signalled an mbarrier, and those whose signals are of phases that are over.
        self._told: dict[tuple, np.ndarray] = defaultdict(clocks.empty)
        self._over_phases: dict[tuple, np.ndarray] = defaultdict(clocks.empty)
        self._last_release = 0
        self._findings = Findings()
        self._hosts = {number: self._thread(number, HOST, clocks.empty()) for number in self._ranks}

    def run(self) -> list[Finding]:
        while self._step():
            pass
        if self._over:
            self._tell_who_waits()
        return self._findings.sorted()

    def _step(self) -> bool:
        """Go on to the next event that orders ranks, and past it; False at the end of all notes."""
        for rank in self._ranks.values():
            if rank.next is None and not rank.over:
                self._advance(rank)
        waiting = [rank for rank in self._ranks.values() if isinstance(rank.next, Met)]
        # Those who need not wait come first: what they do next may have a smaller number than anything else.
        ready = [rank for rank in waiting if self._came[rank.next.key].keys() >= set(rank.next.ranks)]
        numbered = [rank for rank in self._ranks.values() if isinstance(rank.next, (Accessed, Synchronised))]
        if numbered and not ready:
            rank = min(numbered, key=lambda rank: rank.next.number)
            event, rank.next = rank.next, None
            self._synchronise(rank, event) if isinstance(event, Synchronised) else self._access(rank, event)
            return True
        # If the notes of a rank end before, as it was ended, the others go on without it.
        for rank in ready or waiting:
            self._meet(rank)
        return bool(waiting)

    def _meet(self, rank: Rank) -> None:
        met, rank.next, rank.awaiting = rank.next, None, None
        host = self._hosts[rank.number]
        for clock in self._came[met.key].values():
            host.learn(clock)
        host.advance()
        self._gone_on[met.key] += 1
        if self._gone_on[met.key] == len(met.ranks):
            del self._came[met.key], self._gone_on[met.key]

    def _tell_who_waits(self) -> None:
        for rank in self._ranks.values():
            if (awaiting := rank.awaiting) is not None and not awaiting.last:
                missing = set(awaiting.ranks) - self._came[awaiting.key].keys()
                if missing or not awaiting.ranks:
                    others = " and ".join(f"rank {number}" for number in sorted(missing)) or "nobody"
                    text = f"waits in {awaiting.text}, to which {others} {'did not come' if missing else 'came'}"
                    waiting = Waiting(None, "the host", text, rank.places[awaiting.place], "")
                    self._findings.add_waiting(rank.number, waiting)

    def _advance(self, rank: Rank) -> None:
        for event in rank.events:
            if isinstance(event, (Synchronised, Met)) or (isinstance(event, Accessed) and event.number is not None):
                rank.next = event
                return
            self._take(rank, event)
        rank.over = True

    def _take(self, rank: Rank, event: Any) -> None:
        match event:
            case Known(number, place):
                rank.places[number] = place
            case Came(key, last):
                if not last:
                    self._came[key][rank.number] = self._hosts[rank.number].clock
                self._hosts[rank.number].advance()
            case Awaiting():
                rank.awaiting = event
            case Accessed():
                self._access(rank, event)
            case Allocated(spans, text, place, undefined):
                # An argument may have been given to a launch, too, that still runs.
                in_use = spans.space[0] == PRIVATE and rank.bases and self._findings.knows(spans)
                self._findings.allocated(spans, text, rank.places[place], undefined)
                for part in self._shadow.bytes(spans) if not in_use else ():
                    part.forget()
            case Launched(launch):
                host = self._hosts[rank.number]
                rank.bases[launch] = clocks.fenced(host.clock)
                host.advance()
            case Finished(launch):
                host = self._hosts[rank.number]
                for thread in rank.programs.pop(launch, {}).values():
                    host.learn(thread.clock)
                    self._ticks[thread.slot] = thread.tick
                rank.bases.pop(launch, None)
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
            case Told(launch, program, key, ends):
                thread, key = self._who(rank, launch, program), (rank.number, launch, *key)
                self._told[key] = clocks.joined(self._told[key], thread.clock)
                thread.advance()
                if ends:
                    self._over_phases[key] = self._told[key]
            case Heard(launch, program, key):
                self._who(rank, launch, program).learn(self._over_phases[(rank.number, launch, *key)])
            case Fenced(launch, program):
                self._who(rank, launch, program).fence()
            case ProxyFenced(launch, program):
                self._who(rank, launch, program).fence_proxies()
            case Wrong(kind, text, place):
                self._findings.add_wrong(kind, rank.number, text, None if place is None else rank.places[place])
            case Waiting():
                self._findings.add_waiting(rank.number, event)

    # Who ------------------------------------------------------------------------------------------------------------

    def _thread(self, rank: int, program: int, clock: Any, taken: Collection[int] = ()) -> Thread:
        """``taken``: the slots of programs of this number in launches that run beside this one's."""
        beside = 0
        while (slot := self._slots.setdefault((rank, program, beside), len(self._slots))) in taken:
            beside += 1
        return Thread(rank, slot, self._ticks[slot] + 1, clock)

    def _who(self, rank: Rank, launch: int, program: int) -> Thread:
        if program == HOST:
            return self._hosts[rank.number]
        programs = rank.programs[launch]
        if program not in programs:
            taken = [others[program].slot for others in rank.programs.values() if program in others]
            programs[program] = self._thread(rank.number, program, rank.bases.get(launch, clocks.empty()), taken)
        return programs[program]

    def _number(self, access: Access) -> int:
        if access not in self._numbers:
            self._numbers[access] = len(self._accesses)
            self._accesses.append(access)
        return self._numbers[access]

    # Data -----------------------------------------------------------------------------------------------------------

    def _access(self, rank: Rank, event: Accessed) -> None:
        thread = self._who(rank, event.launch, event.program)
        host, place = event.program == HOST, rank.places[event.place]
        small = int((event.spans.ends - event.spans.begins).sum()) <= FLAG_BYTES
        flag = small and event.kind == WRITE
        # A copy engine's writes of a word are seen whole, and programs may poll it.
        copied = "sys" if flag and host and not event.blank else ""
        access = Access(
            thread.slot, thread.tick, rank.number, place, event.kind, copied, host, event.blank, small and not host, 0,
            stale=thread.heard_nothing, async_proxy=event.async_proxy,
        )  # fmt: skip
        for part in self._shadow.bytes(event.spans):
            writers = part.writers()
            self._check_writers(thread, access, writers, event.spans, event.undefined)
            if event.kind == READ:
                self._add_to_sets(thread, access, part, event.spans)
                for number, _ in part.releases() if event.number is not None else ():
                    if number:
                        thread.acquire(self._released[number], False, "sys")
            else:
                sets = part.sets()
                for number, offset in sets:
                    self._check_set(thread, access, number, offset, event.spans)
                part.write(self._number(access._replace(before=writers[0][0], readers=sets[0][0])))
            if flag:
                # The host's copies come one behind the other, as those of a stream; a program's stores do not.
                self._replace_releases(part, {old: None for old, _ in part.releases()}, thread, host, "sys", True)
        if flag:
            thread.advance()

    def _synchronise(self, rank: Rank, event: Synchronised) -> None:
        thread = self._who(rank, event.launch, event.program)
        place = rank.places[event.place]
        access = Access(
            thread.slot, thread.tick, rank.number, place, event.kind, event.scope, False, False, False, 0,
            async_proxy=event.async_proxy,
        )  # fmt: skip
        for part in self._shadow.bytes(event.spans):
            writers = part.writers()
            self._check_writers(thread, access, writers, event.spans, event.undefined and event.kind != WRITE)
            self._add_to_sets(thread, access, part, event.spans)
            releases = part.releases()
            flag = self._flag_in(part, event)
            if flag is not None and event.wait is not None:
                heard = [flag.ending(event.wait, thread)]
            elif event.kind != WRITE or not event.message:
                heard = [self._released.get(number) for number, _ in releases]
            else:
                heard = []
            for released in heard:
                if released is not None:
                    thread.acquire(released, event.acquires, event.scope, event.looks)
            if event.kind != READ:
                before = {old: None if event.message else self._released.get(old) for old, _ in releases}
                self._replace_releases(part, before, thread, event.releases, event.scope, event.gathered)
                if flag is not None:
                    number, writer = part.releases()[0][0], writers[0][0]
                    flag.write(event.after, thread, self._released[number], (number, writer))
        thread.advance()

    def _flag_in(self, part: shadow.Bytes, event: Synchronised) -> Flag | None:
        """What is known of the values of the word that ``event`` is of, if it is of one."""
        if event.before is None:
            return None
        state = part.releases()[0][0], part.writers()[0][0]
        word = event.spans.space, int(event.spans.begins[0])
        if word not in self._flags or not self._flags[word].holds(event.before, state):
            self._flags[word] = Flag(event.before, self._released.get(state[0]), state)
        return self._flags[word]

    def _replace_releases(
        self, part: shadow.Bytes, before: dict[int, Released | None], thread: Thread, asked: bool, scope: str,
        whole: bool,
    ) -> None:  # fmt: skip
        new = {}
        held = part.releases()
        for old, released in before.items():
            self._last_release += 1
            self._released[self._last_release] = thread.release(released, asked, scope, whole)
            new[old] = self._last_release
        part.replace_releases(new)
        for old, count in held:
            self._holders[new[old]] += count
            self._holders[old] -= count
            if old and self._holders[old] <= 0:
                del self._released[old], self._holders[old]

    def _add_to_sets(self, thread: Thread, access: Access, part: shadow.Bytes, spans: Spans) -> None:
        new = {}
        for number, offset in part.sets():
            self._check_set(thread, access, number, offset, spans)
            # Who comes before this access, and would meet the same things, need not be remembered beside it.
            stay, first = [], 0
            for other in self._sets[number]:
                o = self._accesses[other]
                same = o.kind == access.kind and o.atomic == access.atomic
                if not (same and thread.knows(o.thread_slot, o.tick)[: clocks.ASYNC_PROXY].all()):
                    stay.append(other)
                elif access.kind == READ and o.thread_slot == thread.slot:
                    first = o.before or other
            members = tuple(sorted({*stay, self._number(access._replace(before=first))}))
            if members not in self._set_numbers:
                self._set_numbers[members] = len(self._sets)
                self._sets.append(members)
            if self._set_numbers[members] != number:
                new[number] = self._set_numbers[members]
        if new:
            part.replace_sets(new)

    # Races ----------------------------------------------------------------------------------------------------------

    def _check_writers(
        self, thread: Thread, access: Access, writers: list[tuple[int, int]], spans: Spans, undefined: bool
    ) -> None:
        for number, offset in writers:
            if number != shadow.NOBODY:
                self._check(thread, access, number, offset, spans)
            elif undefined:
                self._findings.add_undefined(Side.of(access), spans.space, offset)

    def _check_set(self, thread: Thread, access: Access, number: int, offset: int, spans: Spans) -> None:
        for other in self._sets[number]:
            self._check(thread, access, other, offset, spans)

    def _check(self, thread: Thread, access: Access, number: int, offset: int, spans: Spans) -> None:
        """Note a race of ``access`` with the one of this number, if there is one at the byte at ``offset``."""
        other = self._accesses[number]
        if access.kind == READ and other.kind == READ:
            return
        # A copy of the host's is seen whole, and wipes out what is added meanwhile.
        wipes_out = (access.host or other.host) and UPDATE in (access.kind, other.kind)
        both_atomic = bool(access.atomic and other.atomic) and not wipes_out
        if both_atomic and (READ in (access.kind, other.kind) or self._at_once(access, other)):
            return
        known = thread.knows(other.thread_slot, other.tick)
        if known[clocks.AS_WRITTEN]:
            fetches = access.async_proxy and access.kind == READ
            if fetches and not (other.async_proxy or known[clocks.ASYNC_PROXY]):
                kind = "race/missing-proxy-fence"
                self._findings.add_race(kind, Side.of(other), Side.of(access), spans.space, offset)
            return
        if both_atomic:
            self._findings.add_race("race/scope", Side.of(other), Side.of(access), spans.space, offset, LOST)
            return
        kind = next((cause for how, cause in CAUSES.items() if known[how]), None)
        is_flag = not (access.atomic or other.atomic) and READ in (access.kind, other.kind)
        if known[clocks.BOTH] and not known[: clocks.BOTH].any() and not is_flag:
            # By nothing but what was added to the data themselves, or written over them.
            kind = None
        if kind is None:
            plain, atomic = (access, other) if other.atomic else (other, access)
            if atomic.atomic and plain.flag:
                kind = "race/missing-acquire" if plain.kind == READ else "race/missing-release"
            elif self._is_reuse(thread, access, other, offset, spans):
                kind = "race/reuse"
            else:
                kind = "race"
        self._findings.add_race(kind, Side.of(other), Side.of(access), spans.space, offset)

    @staticmethod
    def _at_once(a: Access, b: Access) -> bool:
        """Whether the scopes of two atomic updates hold both programs, so that none is lost."""
        if a.rank == b.rank:
            return a.thread_slot == b.thread_slot or {a.atomic, b.atomic} <= set(clocks.REACHES_RANK)
        return a.atomic in clocks.REACHES_ALL and b.atomic in clocks.REACHES_ALL

    def _is_reuse(self, thread: Thread, access: Access, other: Access, offset: int, spans: Spans) -> bool:
        """Whether a rank's kernels write anew what the rank wrote before, and the other side reads the older.

        Not if it had read that already, and the writer knew: then it reads the new too early. But it is, if it waited,
        and took a flag of before for this one's.
        """
        if access.kind == READ and other.kind == WRITE:
            # Read in this order by chance: it had got as far as what was written before.
            former = self._accesses[other.before]
            had_read = any(
                self._accesses[reader].thread_slot == access.thread_slot for reader in self._sets[other.readers]
            )
            return (
                self._is_older(former, other)
                and bool(thread.knows(former.thread_slot, former.tick)[clocks.AS_WRITTEN])
                and (access.stale or not had_read)
            )
        if access.kind == WRITE and other.kind == READ:
            one = Spans(spans.space, spans.begins[:1] * 0 + offset, spans.begins[:1] * 0 + offset + 1)
            ((number, _),) = next(iter(self._shadow.bytes(one))).writers()
            first = self._accesses[other.before]
            had_read = other.before and thread.knows(first.thread_slot, first.tick)[clocks.AS_WRITTEN]
            return self._is_older(self._accesses[number], access) and (other.stale or not had_read)
        return False

    @staticmethod
    def _is_older(former: Access, access: Access) -> bool:
        return former.rank == access.rank and not former.blank and not access.host


def notes_in(folder: Path) -> dict[int, Iterator[Any]]:
    """What the ranks have noted in a folder, by rank."""

    def events(path: Path) -> Iterator[Any]:
        with open(path, "rb") as file:
            while True:
                try:
                    yield pickle.load(file)
                except (EOFError, pickle.UnpicklingError):  # the process was ended while it wrote
                    return

    return {int(path.stem.removeprefix("rank")): events(path) for path in folder.glob("rank*.events")}


def analyse(folder: Path) -> list[Finding]:
    """What is wrong in the program whose ranks have noted what they did in ``folder``."""
    return Analysis(notes_in(folder), Onlooker(folder).is_over()).run()
