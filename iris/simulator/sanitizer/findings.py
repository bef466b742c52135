"""What is wrong, said once each: kinds, sentences and places."""

import json
import os
from bisect import bisect_right
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from iris.simulator.sanitizer.events import PRIVATE, READ, UPDATE, WRITE, Line, Place, Spans, Waiting

if TYPE_CHECKING:
    from iris.simulator.sanitizer.races import Access

# Of a race that shows in several ways, the one that says most of its cause.
TELLING = ("race/scope", "race/missing-release", "race/missing-acquire", "race/reuse", "race",
           "race/missing-proxy-fence")  # fmt: skip

REMEDIES = {
    "race/scope": "there is a release and an acquire, but at a scope that does not hold both programs, as 'sys' would",
    "race/missing-release": "the flag between them is not written by a release, as ctx.signal() would",
    "race/missing-acquire": "the flag between them is not read by an acquire, as ctx.wait() would",
    "race/reuse": "the memory is written anew before its reader is known to have read what was there",
    "race": "no release and acquire orders them",
    "race/missing-proxy-fence": "a copy by TMA, unlike a load, needs ctx.order_bulk_copies() in front of it",
}
LOST = "both are atomic, but at a scope that does not hold both programs, as 'sys' would, so one may be lost"
VERBS = {READ: "reads", WRITE: "writes", UPDATE: "updates"}


class Side(NamedTuple):
    """One of the accesses of a finding."""

    rank: int
    verb: str
    place: Place

    @classmethod
    def of(cls, access: "Access") -> "Side":
        return cls(access.rank, VERBS[access.kind], access.place)

    def __str__(self) -> str:
        who = f"kernel {self.place.kernel!r}" if self.place.kernel else "the host"
        return f"{who} of rank {self.rank}"


@dataclass
class Finding:
    """One mistake, and how often it was seen. ``places``: what was done there, and where."""

    kind: str
    sentence: str
    places: list[tuple[str, str]]
    count: int = 1

    def __str__(self) -> str:
        times = f" (seen {self.count} times)" if self.count > 1 else ""
        lines = [f"iris-check: {self.kind}: {self.sentence}{times}"]
        return "\n".join(lines + [f"    {what}: {where}" for what, where in self.places])


def as_json(findings: list[Finding]) -> str:
    return json.dumps([asdict(finding) for finding in findings], indent=1)


def where(place: Place) -> str:
    called = f", called by {line_text(place.caller)}" if place.caller else ""
    return line_text(place.line) + called


def line_text(line: Line) -> str:
    inside = f" in {line.function}" if line.function != "<module>" else ""
    return f"{_shown(line.file)}:{line.number}{inside}"


def _shown(file: str) -> str:
    relative = os.path.relpath(file)
    return file if relative.startswith("..") else relative


@dataclass
class _Race:
    sides: tuple[Side, Side]
    space: tuple[str, int]
    offset: int
    remedy: str | None
    kinds: Counter = field(default_factory=Counter)


class Findings:
    """Collects them; the same one is told once."""

    def __init__(self) -> None:
        self._races: dict[frozenset, _Race] = {}
        self._others: dict[tuple, Finding] = {}
        self._waiting: dict[tuple, tuple[int, Waiting]] = {}
        # By space: where each allocation begins, and what it is.
        self._begins: dict[tuple[str, int], list[int]] = defaultdict(list)
        self._allocated: dict[tuple[str, int], dict[int, tuple[int, str, Place, bool]]] = defaultdict(dict)

    def allocated(self, spans: Spans, text: str, place: Place, undefined: bool) -> None:
        begin, end = int(spans.begins[0]), int(spans.ends[0])
        if begin not in self._allocated[spans.space]:
            self._begins[spans.space].insert(bisect_right(self._begins[spans.space], begin), begin)
        self._allocated[spans.space][begin] = end, text, place, undefined

    def knows(self, spans: Spans) -> bool:
        """Whether there is an allocation of just these bytes."""
        known = self._allocated[spans.space].get(int(spans.begins[0]))
        return known is not None and known[0] == int(spans.ends[0])

    def add_race(
        self, kind: str, one: Side, other: Side, space: tuple[str, int], offset: int, remedy: str | None = None
    ) -> None:
        """``remedy``: what is said instead of what is said of the kind."""
        # Which of the two came first, and on which ranks, is chance.
        key = frozenset(((one.place, one.verb), (other.place, other.verb)))
        self._races.setdefault(key, _Race((one, other), space, offset, remedy)).kinds[kind] += 1

    def add_undefined(self, side: Side, space: tuple[str, int], offset: int) -> None:
        allocation = self._allocation(space, offset)
        if allocation is None or not allocation[3]:
            return
        sentence = f"{side} {side.verb} {self._memory(space, offset)}, which nobody has written"
        self._add("uninitialised", (side.place,), sentence, [(f"{side.verb}, rank {side.rank}", where(side.place))])
        self._others["uninitialised", side.place].places[1:] = [("allocated", where(allocation[2]))]

    def add_wrong(self, kind: str, rank: int, text: str, place: Place | None) -> None:
        who = f"rank {rank}" if place is None or place.kernel is None else f"kernel {place.kernel!r} of rank {rank}"
        sentence = text if kind == "asymmetric" else f"{who} {text}"
        key = () if kind == "asymmetric" else (place,)
        self._add(kind, key, sentence, [] if place is None else [(f"rank {rank}", where(place))])

    def add_waiting(self, rank: int, event: Waiting) -> None:
        self._waiting[rank, event.place, event.flag] = rank, event

    def sorted(self) -> list[Finding]:
        return [*map(self._race, self._races.values()), *self._others.values(), *self._deadlock()]

    def _add(self, kind: str, key: tuple, sentence: str, places: list[tuple[str, str]]) -> None:
        if (kind, *key) in self._others:
            self._others[(kind, *key)].count += 1
        else:
            self._others[(kind, *key)] = Finding(kind, sentence, places)

    def _race(self, race: _Race) -> Finding:
        kind = min(race.kinds, key=TELLING.index)
        one, other = race.sides
        sentence = (
            f"{other} {other.verb} {self._memory(race.space, race.offset)}, which {one} {one.verb}, in no order: "
            f"{race.remedy or REMEDIES[kind]}"
        )
        places = [(f"{side.verb}, rank {side.rank}", where(side.place)) for side in race.sides]
        return Finding(kind, sentence, places, race.kinds.total())

    def _deadlock(self) -> list[Finding]:
        if not self._waiting:
            return []
        waits = list(self._waiting.values())
        told = "; ".join(
            f"{event.programs}{f' of kernel {event.kernel!r}' if event.kernel else ''} of rank {rank} {event.text}"
            + (f" (flag: {event.flag})" if event.flag else "")
            for rank, event in waits
        )
        sentence = f"nobody can go on: {told}"
        return [Finding("deadlock", sentence, [(f"waits, rank {rank}", where(event.place)) for rank, event in waits])]

    def _allocation(self, space: tuple[str, int], offset: int) -> tuple[int, str, Place, bool] | None:
        """Of the tensor there: where it begins, its text, the line that made it, and whether it was left undefined."""
        index = bisect_right(self._begins[space], offset) - 1
        if index < 0:
            return None
        begin = self._begins[space][index]
        end, *rest = self._allocated[space][begin]
        return (begin, *rest) if offset < end else None

    def _memory(self, space: tuple[str, int], offset: int) -> str:
        name, rank = space
        allocation = self._allocation(space, offset)
        if name == PRIVATE:
            if allocation is None:
                return f"memory of rank {rank} alone at {offset:#x}"
            begin, text, *_ = allocation
            return f"{text} on rank {rank} at byte {offset - begin} of its memory"
        if allocation is None:
            return f"the library's memory on rank {rank} at offset {offset:#x}"
        begin, text, *_ = allocation
        return f"{text} on rank {rank} at byte {offset - begin} (offset {offset:#x} of the heap)"
