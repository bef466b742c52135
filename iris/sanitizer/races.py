"""Finds data races: accesses to the same bytes, one of them a write, of which neither happens before the other.

`Analysis` passes each access here, with the thread that did it. It is compared with those that shadow memory has of the
same bytes: the last write, and the reads and atomic operations since. If the thread's clock (`clocks`) does not come
after one of them, that is a race. Its kind says what is missing, such as a release.

Shadow memory also has what was released into each word. A read of a flag acquires that here.
"""

import itertools
from collections import defaultdict

import numpy as np

from iris.observer import READ, UPDATE, WRITE
from iris.sanitizer import clocks, shadow
from iris.sanitizer.accesses import Access, Carrier, Side
from iris.sanitizer.carriers import Carriers
from iris.sanitizer.clocks import Epoch, Released, Thread
from iris.sanitizer.events import Accessed, Place, Spans, Synchronised
from iris.sanitizer.findings import LOST, Findings
from iris.sanitizer.flags import Flag, Guarantees
from iris.simulator.lines import Line

# A plain store of at most so many bytes may be meant as a flag.
FLAG_BYTES = 8

# The kind of a race, by the first row of the clocks in which the two accesses are ordered.
CAUSES = {
    clocks.ANY_SCOPE: "race/scope",
    clocks.ALL_RELEASE: "race/missing-release",
    clocks.ALL_ACQUIRE: "race/missing-acquire",
    clocks.RELEASE_AND_ACQUIRE: "race/missing-release",
}


class Races:
    """Of one program, in all memory of all ranks. ``findings`` gets the races. ``guarantees``: see `flags`."""

    def __init__(self, findings: Findings, guarantees: Guarantees) -> None:
        self._findings, self._guarantees = findings, guarantees
        # Of the updates that guarantees name: what each has released by itself.
        self._by_itself: dict[Epoch, Released] = {}
        self._lucky_looks: dict[Epoch, frozenset[Epoch]] = {}
        # What the numbers in shadow memory stand for: accesses, sets of accesses, and releases.
        self._shadow = shadow.Shadow()
        nothing = Place(None, Line("?", 0, "?"))
        self._accesses = [Access(0, 0, -1, nothing, WRITE, atomic="", host=True, blank=True, flag=False, before=0)]
        self._numbers: dict[Access, int] = {}
        self._sets: list[tuple[int, ...]] = [()]
        self._set_numbers: dict[tuple[int, ...], int] = {(): 0}
        self._released: dict[int, Released] = {}
        self._last_release = 0
        # How many bytes have each release, which is forgotten when none has it any more.
        self._holders: dict[int, int] = defaultdict(int)
        # By space and offset.
        self._flags: dict[tuple, Flag] = {}
        self._carriers = Carriers()

    def forget(self, spans: Spans) -> None:
        """These bytes are new memory."""
        for part in self._shadow.bytes(spans):
            part.forget()

    def accessed(self, thread: Thread, place: Place, event: Accessed) -> None:
        """``thread`` has loaded or stored data at this line."""
        host = event.launch == 0
        small = int((event.spans.ends - event.spans.begins).sum()) <= FLAG_BYTES
        sets_flag = small and event.kind == WRITE
        # The host writes a word by a copy, which is never seen in part. So kernels may poll the word.
        scope_of_copy = "sys" if sets_flag and host and not event.blank else ""
        access = Access(
            thread.slot,
            thread.tick,
            thread.rank,
            place,
            event.kind,
            atomic=scope_of_copy,
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
                        thread.acquire(self._released[number], is_acquire=False, scope="sys")
                self._note_carrier(thread, before, access, part, event.spans)
            else:
                sets = part.sets()
                for number, offset in sets:
                    self._check_set(thread, access, number, offset, event.spans)
                part.write(self._number(access._replace(before=writers[0][0], readers=sets[0][0])))
            if sets_flag:
                # Copies by the host are ordered, as those of a stream, so they count as releases. A program's stores do
                # not.
                before_it: dict[int, Released | None] = {old: None for old, _ in part.releases()}
                self._replace_releases(part, before_it, thread, is_release=host, scope="sys", whole_cta=True)
        if sets_flag:
            thread.advance()

    def synchronised(self, thread: Thread, place: Place, event: Synchronised) -> None:
        """``thread`` has done an atomic operation at this line, or the like, by which it may release or acquire."""
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
            flag, clock = self._flag_in(part, event), thread.clock
            for released in self._acquired(thread, event, flag, releases):
                if released is not None:
                    thread.acquire(released, event.acquires, event.scope, event.may_wait)
            self._note_carrier(thread, clock, access, part, event.spans)
            if event.kind != READ:
                before = {old: None if event.message else self._released.get(old) for old, _ in releases}
                self._replace_releases(part, before, thread, event.releases, event.scope, event.whole_cta)
                if flag is not None:
                    if event.kind == UPDATE and not event.adds:
                        flag.write_otherwise()
                    number, writer = part.releases()[0][0], writers[0][0]
                    assert event.before is not None and event.after is not None  # of a flag
                    added = event.after - event.before if event.adds else None
                    released = self._released[number]
                    flag.write(event.after, added, thread, clock[clocks.AS_WRITTEN], released, (number, writer))
                    if (epoch := (thread.slot, thread.tick)) in self._guarantees.updates:
                        self._by_itself[epoch] = thread.release(None, event.releases, event.scope, event.whole_cta)
        thread.advance()

    def _note_carrier(
        self, thread: Thread, before: np.ndarray, access: Access, part: shadow.Bytes, spans: Spans
    ) -> None:
        """If ``access`` has acquired anything, remember by which word. ``before``: the thread's clock before it."""
        if thread.clock is not before:
            (writer, offset), numbers = part.writers()[0], self._sets[part.sets()[0][0]]
            wrote = [self._accesses[number] for number in (*numbers, writer)]
            writers = tuple(each for each in wrote if each.kind != READ and not each.blank)
            self._carriers.acquired(thread, before, Carrier(spans.space, offset, Side.of(access), writers))

    def _acquired(
        self, thread: Thread, event: Synchronised, flag: Flag | None, releases: list[tuple[int, int]]
    ) -> list[Released | None]:
        """What ``thread`` acquires by ``event`` from a word that holds ``releases``, numbers and counts of bytes."""
        # What does not read the word, or whose result nobody uses, acquires nothing.
        if (event.kind == WRITE and event.message) or event.dropped:
            return []
        # An update, such as of a lock, is ordered with other updates in every run. A read may be lucky.
        if flag is not None and event.kind == READ:
            flag.look(event.wait, thread, thread.clock[clocks.AS_WRITTEN])
            sure = self._guarantees.of_looks.get((thread.slot, thread.tick))
            if sure is not None:
                return [self._by_itself.get(epoch) for epoch in sure]
            if event.wait is not None and flag.in_order:
                assert event.before is not None
                return [flag.first(event.wait, thread)] if event.wait.ends_at(event.before) else []
        return [self._released.get(number) for number, _ in releases]

    def lucky_looks(self) -> dict[Epoch, frozenset[Epoch]]:
        """See `flags`."""
        return dict(itertools.chain(self._lucky_looks.items(), *(flag.lucky_looks() for flag in self._flags.values())))

    def _flag_in(self, part: shadow.Bytes, event: Synchronised) -> Flag | None:
        """The history of the word that ``event`` accesses; None if it is not a single word."""
        if event.before is None:
            return None
        state = part.releases()[0][0], part.writers()[0][0]
        word = event.spans.space, int(event.spans.begins[0])
        flag = self._flags.get(word)
        if flag is None or not flag.holds(event.before, state):
            if flag is not None:
                self._lucky_looks.update(flag.lucky_looks())
            self._flags[word] = Flag(event.before, self._released.get(state[0]), state)
        return self._flags[word]

    def _replace_releases(
        self,
        part: shadow.Bytes,
        before: dict[int, Released | None],
        thread: Thread,
        is_release: bool,
        scope: str,
        whole_cta: bool,
    ) -> None:
        """``thread`` writes to these bytes. ``before``: by number, each release there, or None if it ends here."""
        new = {}
        held = part.releases()
        for old, released in before.items():
            self._last_release += 1
            self._released[self._last_release] = thread.release(released, is_release, scope, whole_cta)
            new[old] = self._last_release
        part.replace_releases(new)
        for old, count in held:
            self._holders[new[old]] += count
            self._holders[old] -= count
            if old and self._holders[old] <= 0:
                del self._released[old], self._holders[old]

    def _add_to_sets(self, thread: Thread, access: Access, part: shadow.Bytes, spans: Spans) -> None:
        """Check a read or an atomic operation against those before, and add it to them."""
        new = {}
        for number, offset in part.sets():
            self._check_set(thread, access, number, offset, spans)
            # An earlier access of the same kind that happens before this one need not be kept: what races with it
            # races with this one, too.
            stay, first = [], 0
            for other in self._sets[number]:
                earlier = self._accesses[other]
                same = earlier.kind == access.kind and earlier.atomic == access.atomic
                if not (same and thread.is_after(earlier.thread_slot, earlier.tick)[: clocks.ASYNC_PROXY].all()):
                    stay.append(other)
                elif access.kind == READ and earlier.thread_slot == thread.slot:
                    first = earlier.before or other
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
        """``undefined``: the values that were read look as if nobody had written them."""
        for number, offset in writers:
            if number != shadow.NOBODY:
                self._check(thread, access, number, offset, spans)
            elif undefined:
                self._findings.add_undefined(Side.of(access), spans.space, offset)

    def _check_set(self, thread: Thread, access: Access, number: int, offset: int, spans: Spans) -> None:
        for other in self._sets[number]:
            self._check(thread, access, other, offset, spans)

    def _check(self, thread: Thread, access: Access, number: int, offset: int, spans: Spans) -> None:
        """Report a race between ``access`` and the earlier one of this number, if there is one at this byte."""
        other = self._accesses[number]
        if access.kind == READ and other.kind == READ:
            return
        # A copy by the host is never seen in part, but it undoes an atomic update that happens meanwhile.
        undoes = (access.host or other.host) and UPDATE in (access.kind, other.kind)
        both_atomic = bool(access.atomic and other.atomic) and not undoes
        if both_atomic and (READ in (access.kind, other.kind) or self._scopes_suffice(access, other)):
            return
        ordered = thread.is_after(other.thread_slot, other.tick)  # by row of the clocks
        if ordered[clocks.AS_WRITTEN]:
            read_by_tma = access.async_proxy and access.kind == READ
            if read_by_tma and not (other.async_proxy or ordered[clocks.ASYNC_PROXY]):
                kind = "race/missing-proxy-fence"
                self._findings.add_race(kind, Side.of(other), Side.of(access), spans.space, offset)
            return
        if both_atomic:
            self._findings.add_race("race/scope", Side.of(other), Side.of(access), spans.space, offset, LOST)
            return
        cause = next((cause for row, cause in CAUSES.items() if ordered[row]), None)
        plain_read = not (access.atomic or other.atomic) and READ in (access.kind, other.kind)
        only_by_both = ordered[clocks.RELEASE_AND_ACQUIRE] and not ordered[: clocks.RELEASE_AND_ACQUIRE].any()
        if only_by_both and not plain_read:
            # All that could order them is an update of the very word that they access, which is data and no flag.
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
    def _scopes_suffice(a: Access, b: Access) -> bool:
        """Whether the scopes of two atomic updates contain both programs, so that none is lost."""
        if a.rank == b.rank:
            return a.thread_slot == b.thread_slot or {a.atomic, b.atomic} <= set(clocks.REACHES_RANK)
        return a.atomic in clocks.REACHES_ALL and b.atomic in clocks.REACHES_ALL

    def _is_reuse(self, thread: Thread, access: Access, other: Access, offset: int, spans: Spans) -> bool:
        """Whether the race is of a buffer that is used again: a rank writes it anew before its older contents are read.

        It is not if the reader had read the older contents, and the writer came after that: then the reader reads the
        new ones too early. But it is in spite of that if the reader's wait was stale: it took an earlier round's flag
        for this one's.
        """
        if access.kind == READ and other.kind == WRITE:
            # The write came first by chance. The contents that the reader is ordered after are those before it.
            former = self._accesses[other.before]
            had_read = any(
                self._accesses[reader].thread_slot == access.thread_slot for reader in self._sets[other.readers]
            )
            return (
                self._is_older(former, other)
                and bool(thread.is_after(former.thread_slot, former.tick)[clocks.AS_WRITTEN])
                and (access.stale or not had_read)
            )
        if access.kind == WRITE and other.kind == READ:
            one = Spans(spans.space, spans.begins[:1] * 0 + offset, spans.begins[:1] * 0 + offset + 1)
            ((number, _),) = next(iter(self._shadow.bytes(one))).writers()
            first = self._accesses[other.before]
            had_read = bool(other.before and thread.is_after(first.thread_slot, first.tick)[clocks.AS_WRITTEN])
            return self._is_older(self._accesses[number], access) and (other.stale or not had_read)
        return False

    @staticmethod
    def _is_older(former: Access, access: Access) -> bool:
        return former.rank == access.rank and not former.blank and not access.host
