"""Words the reports: collects what the analysis has found, says each mistake once, and names its lines.

The kinds, such as "race/missing-acquire", are those of docs/debugging.md.
"""

import json
from bisect import bisect_right, insort
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from iris.errors import names
from iris.heap.history import shown
from iris.sanitizer.accesses import Carrier, Side, who_is
from iris.sanitizer.elements import element
from iris.sanitizer.events import PRIVATE, Diagnostic, Place, SharedRace, Spans, Waiting
from iris.simulator.lines import Line

# Between two lines there may be races of several kinds. The one that comes first here is reported: it says most of the
# cause.
PRIORITY = (
    "race/scope",
    "race/missing-release",
    "race/missing-acquire",
    "race/reuse",
    "race",
    "race/missing-proxy-fence",
)

REMEDIES = {
    "race/scope": "{flag} is released and acquired at a scope that does not hold both programs, as 'sys' would",
    "race/missing-release": "{flag} is not written by a release, as ctx.signal() would",
    "race/missing-acquire": "{flag} is not read by an acquire, as ctx.wait() would",
    "race/reuse": "the memory is written anew before its reader is known to have read what was there",
    "race": "no release and acquire, and no barrier, orders them",
    "race/missing-proxy-fence": "a copy by TMA, unlike a load, needs ctx.order_bulk_copies() before it",
}
# The kinds whose report names the flag.
WITH_FLAG = ("race/scope", "race/missing-release", "race/missing-acquire")
UNAWAITED = "nobody has waited for the call in between, as its wait() would"
LOST = "both are atomic, but at a scope that does not hold both programs, as 'sys' would, so one may be lost"
# For each place of a deadlock, so many waits are described in full.
MOST_AT_A_PLACE = 8


@dataclass
class Finding:
    """One mistake. ``places``: what was done there, and where; ``count``: how often it was seen, on which ``ranks``."""

    kind: str
    sentence: str
    places: list[tuple[str, str]]
    count: int = 1
    ranks: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        times = f" (seen {self.count} times, on {names(self.ranks)})" if self.count > 1 else ""
        lines = [f"iris-check: {self.kind}: {self.sentence}{times}"]
        return "\n".join(lines + [f"    {what}: {where}" for what, where in self.places])


def united(findings: list[Finding]) -> list[Finding]:
    """The findings of several launches. A mistake that several of them have at the same lines is reported once."""
    known: dict[tuple, Finding] = {}
    for finding in findings:
        # Not by the ranks of the example, nor by which access was seen first: these differ from launch to launch.
        lines = frozenset((what.partition(",")[0], line) for what, line in finding.places)
        same = known.setdefault((finding.kind, lines or finding.sentence), finding)
        if same is not finding:
            same.count += finding.count
            same.ranks = sorted({*same.ranks, *finding.ranks})
    return list(known.values())


def as_json(findings: list[Finding]) -> str:
    return json.dumps([asdict(finding) for finding in findings], indent=1)


def where(place: Place) -> str:
    """The line of ``place``, with its caller's, as a report shows it."""
    called = f", called by {line_text(place.caller)}" if place.caller else ""
    return line_text(place.line) + called


def line_text(line: Line) -> str:
    inside = f" in {line.function}" if line.function != "<module>" else ""
    return f"{shown(line.file)}:{line.number}{inside}"


class _Example(NamedTuple):
    """A race at the byte at ``offset`` of ``space``. ``flag``: the one that would order the two sides."""

    sides: tuple[Side, Side]
    space: tuple[str, int]
    offset: int
    remedy: str | None
    flag: Carrier | None


class _Allocation(NamedTuple):
    """A tensor's memory, from offset ``begin`` to ``end`` of its space. ``text``: the tensor, in words."""

    begin: int
    end: int
    text: str
    place: Place
    undefined: bool


@dataclass
class _Race:
    """All races between two lines in one tensor: how many of each kind, and the first of each as an example."""

    kinds: Counter = field(default_factory=Counter)
    examples: dict[str, _Example] = field(default_factory=dict)
    ranks: set[int] = field(default_factory=set)


class Findings:
    """Collects mistakes. The same one is reported once."""

    def __init__(self) -> None:
        self._races: dict[tuple, _Race] = {}
        self._others: dict[tuple, Finding] = {}
        self._waiting: dict[tuple, tuple[int, Waiting]] = {}
        # By space: the latest allocation at each offset, and these offsets in order.
        self._allocated: dict[tuple[str, int], dict[int, _Allocation]] = defaultdict(dict)
        self._begins: dict[tuple[str, int], list[int]] = defaultdict(list)

    def allocated(self, spans: Spans, text: str, place: Place, undefined: bool) -> None:
        """There is a new tensor: reports name the memory by it."""
        begin, end = int(spans.begins[0]), int(spans.ends[0])
        if begin not in self._allocated[spans.space]:
            insort(self._begins[spans.space], begin)
        self._allocated[spans.space][begin] = _Allocation(begin, end, text, place, undefined)

    def has_allocation(self, spans: Spans) -> bool:
        """Whether there is an allocation of just these bytes."""
        known = self._allocated[spans.space].get(int(spans.begins[0]))
        return known is not None and known.end == int(spans.ends[0])

    def add_race(
        self,
        kind: str,
        one: Side,
        other: Side,
        space: tuple[str, int],
        offset: int,
        remedy: str | None = None,
        flag: Carrier | None = None,
    ) -> None:
        """``remedy``: a text in place of that of the kind. ``flag``: the one that would order the two sides."""
        # Equal races differ, by chance, in which side came first, in their ranks and in their elements.
        tensor = self._allocation(space, offset)
        # (Offsets of private memory are addresses, which differ by chance, too.)
        which = None if tensor is None else tensor.text if space[0] == PRIVATE else tensor.begin
        key = frozenset((one.place, other.place)), space[0], which
        race = self._races.setdefault(key, _Race())
        race.kinds[kind] += 1
        race.examples.setdefault(kind, _Example((one, other), space, offset, remedy, flag))
        race.ranks |= {one.rank, other.rank}

    def add_undefined(self, side: Side, space: tuple[str, int], offset: int) -> None:
        """``side`` has read what nobody has written. It is a mistake if the tensor was allocated so."""
        tensor = self._allocation(space, offset)
        if tensor is None or not tensor.undefined:
            return
        sentence = f"{side} {side.verb} {self._memory(space, offset)}, which nobody has written"
        places = [(f"{side.verb}, rank {side.rank}", where(side.place)), ("allocated", where(tensor.place))]
        self._add("uninitialised", (side.place, tensor.text), side.rank, sentence, places)

    def add_diagnostic(self, rank: int, event: Diagnostic, place: Place | None) -> None:
        if event.kind == "asymmetric":
            assert place is not None
            self._add_asymmetric(rank, event, place)
            return
        who = f"rank {rank}" if place is None or place.kernel is None else who_is(place, rank, event.program)
        places = [] if place is None else [(f"rank {rank}", where(place))]
        self._add(event.kind, (place,), rank, f"{who} {event.text}", places)

    def _add_asymmetric(self, rank: int, event: Diagnostic, place: Place) -> None:
        """All ranks report it. The place of a rank that made no differing call is where the ranks met."""
        at = dict(event.places)
        at.setdefault(rank, place.line)
        known = self._others.setdefault(("asymmetric",), Finding("asymmetric", event.text, []))
        places = dict(known.places) | {f"rank {number}": line_text(line) for number, line in at.items()}
        known.places = sorted(places.items(), key=lambda place: int(place[0].split()[1]))
        known.ranks = sorted({*known.ranks, *at})

    def add_shared_race(self, rank: int, event: SharedRace, first: Place, second: Place) -> None:
        """``first``, ``second``: the places of its two accesses."""
        (partition, verb, _), (later, later_verb, _) = event.first, event.second
        who = "it" if partition == later else f"partition {partition}"
        sentence = (
            f"{who_is(second, rank, event.program)} {later_verb} shared memory that {who} {verb}, in no order: "
            f"{event.missing}"
        )
        places = [(f"{verb}, rank {rank}", where(first)), (f"{later_verb}, rank {rank}", where(second))]
        self._add(event.kind, (first, second, verb, later_verb), rank, sentence, places)

    def add_waiting(self, rank: int, event: Waiting) -> None:
        self._waiting[rank, event.place, event.flag] = rank, event

    def all(self) -> list[Finding]:
        """Races first, and a deadlock last."""
        return [*map(self._race_finding, self._races.values()), *self._others.values(), *self._deadlock_findings()]

    def _add(self, kind: str, key: tuple, rank: int, sentence: str, places: list[tuple[str, str]]) -> None:
        """A mistake of this kind was seen. ``key``: what is equal for equal ones."""
        key = (kind, *key)
        if key in self._others:
            self._others[key].count += 1
        else:
            self._others[key] = Finding(kind, sentence, places)
        known = self._others[key]
        known.ranks = sorted({*known.ranks, rank})

    def _race_finding(self, race: _Race) -> Finding:
        kind = min(race.kinds, key=PRIORITY.index)
        (one, other), space, offset, remedy, flag = race.examples[kind]
        if kind == "race" and any(side.place.call for side in (one, other)):
            remedy = UNAWAITED
        remedy = remedy or REMEDIES[kind]
        places = [(f"{side.verb}, rank {side.rank}", where(side.place)) for side in (one, other)]
        if kind in WITH_FLAG and flag is not None:
            remedy = remedy.format(flag=f"the flag between them, {self._memory(flag.space, flag.offset)},")
            # One rank for each line, as an example.
            written = {where(each.place): each.rank for each in reversed(flag.writers)}
            places += [(f"writes the flag, rank {rank}", line) for line, rank in written.items()]
            places.append((f"reads the flag, rank {flag.reader.rank}", where(flag.reader.place)))
        memory = self._memory(space, offset)
        text = f"{other} {other.verb} {memory}, which {one} {one.verb}, in no order: "
        text += remedy.format(flag="the flag between them")
        return Finding(kind, text, places, race.kinds.total(), sorted(race.ranks))

    def _deadlock_findings(self) -> list[Finding]:
        # A wait for a flag outside of all tensors is a mistake of its own. Without it the others may go on.
        if not self._waiting or any(event.outside for _, event in self._waiting.values()):
            return []
        waits: list[str] = []
        places: dict[tuple[str, str], None] = {}
        shown_at: Counter[Place] = Counter()
        left = 0
        for rank, event in self._waiting.values():
            shown_at[event.place] += 1
            places[f"waits, rank {rank}", where(event.place)] = None
            if shown_at[event.place] > MOST_AT_A_PLACE:
                left += 1
                continue
            waits.append(
                f"{event.programs}{f' of kernel {event.kernel!r}' if event.kernel else ''} of rank {rank} {event.text}"
                + (f" (flag: {event.flag})" if event.flag else "")
            )
        more = f"; and {left} more at these places" if left else ""
        ranks = sorted({rank for rank, _ in self._waiting.values()})
        return [Finding("deadlock", f"nobody can go on: {'; '.join(waits)}{more}", list(places), ranks=ranks)]

    def _allocation(self, space: tuple[str, int], offset: int) -> _Allocation | None:
        """The tensor that has this byte."""
        index = bisect_right(self._begins[space], offset) - 1
        if index < 0:
            return None
        found = self._allocated[space][self._begins[space][index]]
        return found if offset < found.end else None

    def _memory(self, space: tuple[str, int], offset: int) -> str:
        """The byte's tensor and element, in words."""
        name, rank = space
        tensor = self._allocation(space, offset)
        if tensor is None:
            if name == PRIVATE:
                return f"memory of rank {rank} alone at {offset:#x}"
            return f"the library's memory on rank {rank} at offset {offset:#x}"
        byte = offset - tensor.begin
        within = element(tensor.text, byte)
        if name == PRIVATE:
            return f"{tensor.text} on rank {rank}{within or f' at byte {byte}'}"
        return f"{tensor.text} on rank {rank}{within} (offset {offset:#x} of the heap)"
