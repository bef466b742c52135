"""Accesses that no release and acquire has put in order.

`Analysis` goes on from one access to the next, and knows who did it, with which clock. Here each is compared with those
that `shadow` has of the same bytes: who wrote them last, and who has read them since. What the clocks do not put in
order is a race, and its kind says what it is for want of. What is released into memory stands there too, and who
acquires it learns it here.
"""

from collections import defaultdict

import numpy as np

from iris.observer import READ, UPDATE, WRITE
from iris.sanitizer import clocks, shadow
from iris.sanitizer.accesses import Access, Carrier, Side
from iris.sanitizer.carriers import Carriers
from iris.sanitizer.clocks import Released, Thread
from iris.sanitizer.events import Accessed, Place, Spans, Synchronised
from iris.sanitizer.findings import LOST, Findings
from iris.sanitizer.flags import Flag, Moment, Verdicts
from iris.simulator.lines import Line

# A plain store of so many bytes at most may be meant as a flag.
FLAG_BYTES = 8

# What a race is for want of, by the first of the clocks in which it would be none.
CAUSES = {
    clocks.ANY_SCOPE: "race/scope",
    clocks.ALL_RELEASE: "race/missing-release",
    clocks.ALL_ACQUIRE: "race/missing-acquire",
    clocks.BOTH: "race/missing-release",
}


class Races:
    """Of one program, in all memory of all ranks; ``findings`` gets them. ``verdicts``: see `flags`."""

    def __init__(self, findings: Findings, verdicts: Verdicts) -> None:
        self._findings, self._verdicts = findings, verdicts
        # Of the updates that verdicts name: what they have released themselves.
        self._alone: dict[Moment, Released] = {}
        self._luck: dict[Moment, frozenset[Moment]] = {}
        self._shadow = shadow.Shadow()
        nothing = Place(None, Line("?", 0, "?"))
        self._accesses = [Access(0, 0, -1, nothing, WRITE, atomic="", host=True, blank=True, flag=False, before=0)]
        self._numbers: dict[Access, int] = {}
        self._sets: list[tuple[int, ...]] = [()]
        self._set_numbers: dict[tuple[int, ...], int] = {(): 0}
        self._released: dict[int, Released] = {}
        self._holders: dict[int, int] = defaultdict(int)
        self._flags: dict[tuple, Flag] = {}
        self._last_release = 0
        self._carriers = Carriers()

    def forget(self, spans: Spans) -> None:
        """These bytes are new memory."""
        for part in self._shadow.bytes(spans):
            part.forget()

    def accessed(self, thread: Thread, place: Place, event: Accessed) -> None:
        """``thread`` has loaded or stored data, at this place of its program."""
        host = event.launch == 0
        small = int((event.spans.ends - event.spans.begins).sum()) <= FLAG_BYTES
        flag = small and event.kind == WRITE
        # A copy engine's writes of a word are seen whole, and programs may poll it.
        copied = "sys" if flag and host and not event.blank else ""
        access = Access(
            thread.slot,
            thread.tick,
            thread.rank,
            place,
            event.kind,
            atomic=copied,
            host=host,
            blank=event.blank,
            flag=small and not host,
            before=0,
            stale=thread.acquired_nothing,
            async_proxy=event.async_proxy,
            program=thread.program,
        )
        for part in self._shadow.bytes(event.spans):
            writers = part.writers()
            self._check_writers(thread, access, writers, event.spans, event.undefined)
            if event.kind == READ:
                self._add_to_sets(thread, access, part, event.spans)
                before = thread.clock
                for number, _ in part.releases() if event.number is not None else ():
                    if number:
                        thread.acquire(self._released[number], False, "sys")
                self._note_carrier(thread, before, access, part, event.spans)
            else:
                sets = part.sets()
                for number, offset in sets:
                    self._check_set(thread, access, number, offset, event.spans)
                part.write(self._number(access._replace(before=writers[0][0], readers=sets[0][0])))
            if flag:
                # The host's copies come one after the other, as those of a stream; a program's stores do not.
                self._replace_releases(part, {old: None for old, _ in part.releases()}, thread, host, "sys", True)
        if flag:
            thread.advance()

    def synchronised(self, thread: Thread, place: Place, event: Synchronised) -> None:
        """``thread`` has done what others may do at the same time, and by which it may release, or acquire."""
        access = Access(
            thread.slot,
            thread.tick,
            thread.rank,
            place,
            event.kind,
            atomic=event.scope,
            host=event.once,
            blank=False,
            flag=False,
            before=0,
            async_proxy=event.async_proxy,
            program=thread.program,
        )
        for part in self._shadow.bytes(event.spans):
            writers = part.writers()
            self._check_writers(thread, access, writers, event.spans, event.undefined and event.kind != WRITE)
            self._add_to_sets(thread, access, part, event.spans)
            releases = part.releases()
            flag, before_it = self._flag_in(part, event), thread.clock
            known = before_it[clocks.AS_WRITTEN]
            for released in self._acquired(thread, event, flag, releases):
                if released is not None:
                    thread.acquire(released, event.acquires, event.scope, event.looks)
            self._note_carrier(thread, before_it, access, part, event.spans)
            if event.kind != READ:
                before = {old: None if event.message else self._released.get(old) for old, _ in releases}
                self._replace_releases(part, before, thread, event.releases, event.scope, event.gathered)
                if flag is not None:
                    if event.kind == UPDATE and not event.adds:
                        flag.write_otherwise()
                    number, writer = part.releases()[0][0], writers[0][0]
                    assert event.before is not None and event.after is not None  # of a flag
                    added = event.after - event.before if event.adds else None
                    flag.write(event.after, added, thread, known, self._released[number], (number, writer))
                    if (moment := (thread.slot, thread.tick)) in self._verdicts.wanted:
                        self._alone[moment] = thread.release(None, event.releases, event.scope, event.gathered)
        thread.advance()

    def _note_carrier(
        self, thread: Thread, before: np.ndarray, access: Access, part: shadow.Bytes, spans: Spans
    ) -> None:
        if thread.clock is not before:
            (writer, offset), numbers = part.writers()[0], self._sets[part.sets()[0][0]]
            wrote = [self._accesses[number] for number in (*numbers, writer)]
            writers = tuple(each for each in wrote if each.kind != READ and not each.blank)
            self._carriers.acquired(thread, before, Carrier(spans.space, offset, Side.of(access), writers))

    def _acquired(
        self, thread: Thread, event: Synchronised, flag: Flag | None, releases: list[tuple[int, int]]
    ) -> list[Released | None]:
        """What ``thread`` may learn by ``event`` from a word that holds ``releases``."""
        if (event.kind == WRITE and event.message) or event.dropped:
            return []
        # Who changes what it looks at, as a lock, is in an order with the others whichever comes first.
        if flag is not None and event.kind == READ:
            flag.look(event.wait, thread, thread.clock[clocks.AS_WRITTEN])
            reliable = self._verdicts.of.get((thread.slot, thread.tick))
            if reliable is not None:
                return [self._alone.get(moment) for moment in reliable]
            if event.wait is not None and flag.in_order:
                assert event.before is not None
                return [flag.first(event.wait, thread)] if event.wait.ends_at(event.before) else []
        return [self._released.get(number) for number, _ in releases]

    def luck(self) -> dict[Moment, frozenset[Moment]]:
        """See `flags`."""
        return dict(self._luck) | {look: reliable for flag in self._flags.values() for look, reliable in flag.luck()}

    def _flag_in(self, part: shadow.Bytes, event: Synchronised) -> Flag | None:
        """What is known of the values of the word that ``event`` is of, if it is of one."""
        if event.before is None:
            return None
        state = part.releases()[0][0], part.writers()[0][0]
        word = event.spans.space, int(event.spans.begins[0])
        flag = self._flags.get(word)
        if flag is None or not flag.holds(event.before, state):
            if flag is not None:
                self._luck.update(flag.luck())
            self._flags[word] = Flag(event.before, self._released.get(state[0]), state)
        return self._flags[word]

    def _replace_releases(
        self,
        part: shadow.Bytes,
        before: dict[int, Released | None],
        thread: Thread,
        asked: bool,
        scope: str,
        whole: bool,
    ) -> None:
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

    def _number(self, access: Access) -> int:
        if access not in self._numbers:
            self._numbers[access] = len(self._accesses)
            self._accesses.append(access)
        return self._numbers[access]

    # Two accesses ---------------------------------------------------------------------------------------------------

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
        cause = next((cause for how, cause in CAUSES.items() if known[how]), None)
        is_flag = not (access.atomic or other.atomic) and READ in (access.kind, other.kind)
        if known[clocks.BOTH] and not known[: clocks.BOTH].any() and not is_flag:
            # By nothing but what was added to the data themselves, or written over them.
            cause = None
        flag = None if cause is None else self._carriers.between(thread, other)
        if cause is not None:
            kind = cause
        else:
            plain, atomic = (access, other) if other.atomic else (other, access)
            if atomic.atomic and plain.flag:
                kind = "race/missing-acquire" if plain.kind == READ else "race/missing-release"
            elif not (access.place.call or other.place.call) and self._is_reuse(thread, access, other, offset, spans):
                kind = "race/reuse"
            else:
                kind = "race"
        self._findings.add_race(kind, Side.of(other), Side.of(access), spans.space, offset, flag=flag)

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
            had_read = bool(other.before and thread.knows(first.thread_slot, first.tick)[clocks.AS_WRITTEN])
            return self._is_older(self._accesses[number], access) and (other.stale or not had_read)
        return False

    @staticmethod
    def _is_older(former: Access, access: Access) -> bool:
        return former.rank == access.rank and not former.blank and not access.host
