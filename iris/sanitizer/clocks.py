"""Vector clocks: which of two accesses happens before the other.

Each program of a launch, and each thread of a rank's host, is a `Thread` with a *slot* of its own in all clocks. There
it counts *ticks*, one up after each operation that may be a release. So a slot and a tick, an *epoch*, name what a
thread did between two such operations. A thread comes after an epoch if its clock has at least that tick in that slot
(Lamport; Fidge and Mattern; for races: FastTrack, Flanagan and Freund 2009).

A clock here is an array of six rows, each a vector clock by rules of its own. In the first, an edge is what the program
asked for: a release and an acquire of the same word, both at a scope that contains the two threads (PTX ISA, "Memory
Consistency Model": morally strong, causality order). Rows 2 to 5 assume more synchronisation than the program has. If
two accesses race by the first row but not by one of these, that row names the cause. The last row is for TMA: it has
the edges of the first, but an edge counts only for accesses that a proxy fence came after.

Why TMA needs a row: its copies access memory through the async proxy, loads and stores through the generic one. Between
accesses through different proxies there must be a proxy fence (PTX ISA, "Async proxy"). The manual does not say in
whose thread, so it counts wherever it stands on the way from one access to the other, as an alias proxy fence does
("Causality Order"). Two cases need none: launches ("Memory synchronization": launches by the CUDA API keep the order of
proxies), and what TMA has written (an "implicit generic-async proxy fence" where a copy completes).
"""

from typing import NamedTuple

import numpy as np

AS_WRITTEN, ANY_SCOPE, ALL_RELEASE, ALL_ACQUIRE, RELEASE_AND_ACQUIRE, ASYNC_PROXY = range(6)
"""The rows of a clock, by what counts as an edge:

* AS_WRITTEN: what the program asks for
* ANY_SCOPE: as if each operation had the scope of the system
* ALL_RELEASE: besides that, as if each write to a flag were a release
* ALL_ACQUIRE: besides ANY_SCOPE, as if each read of a flag were an acquire
* RELEASE_AND_ACQUIRE: both
* ASYNC_PROXY: as AS_WRITTEN, for accesses by TMA
"""
NUM_ROWS = 6

REAL_SCOPES = [AS_WRITTEN, ASYNC_PROXY]
"""The rows in which an operation has the scope that the program asks for."""

REAL_RELEASES, REAL_ACQUIRES = [*REAL_SCOPES, ANY_SCOPE, ALL_ACQUIRE], [*REAL_SCOPES, ANY_SCOPE, ALL_RELEASE]
"""The rows in which only what is asked for as a release, or as an acquire, is one."""

REACHES_RANK, REACHES_ALL = ("gpu", "sys"), ("sys",)
"""The scopes that contain all programs of a rank, and those of all ranks."""

Epoch = tuple[int, int]
"""A slot and a tick."""


def empty() -> np.ndarray:
    """The clock of a thread that comes after nothing."""
    return np.zeros((NUM_ROWS, 0), dtype=np.int32)


def joined(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The join of two clocks: what comes after both. Neither is changed."""
    if a is b:
        return a
    if a.shape[1] < b.shape[1]:
        a, b = b, a
    result = a.copy()
    np.maximum(result[:, : b.shape[1]], b, out=result[:, : b.shape[1]])
    return result


def joined_rows(target: np.ndarray, source: np.ndarray, rows: list[int]) -> np.ndarray:
    """``target``, with ``source`` joined to it in some rows. Neither is changed."""
    width = max(target.shape[1], source.shape[1])
    result = np.zeros((NUM_ROWS, width), dtype=np.int32)
    result[:, : target.shape[1]] = target
    part = result[rows, : source.shape[1]]
    result[rows, : source.shape[1]] = np.maximum(part, source[rows])
    return result


def after_proxy_fence(clock: np.ndarray) -> np.ndarray:
    """``clock`` after a proxy fence: what comes before other accesses comes before TMA's, too. It is not changed."""
    result = clock.copy()
    result[ASYNC_PROXY] = result[AS_WRITTEN]
    return result


class Released(NamedTuple):
    """The clocks that were released into a word: for everyone, and by rank for the programs of that rank alone.

    An atomic update keeps what was released into the word before: a read of the update acquires that, too (PTX ISA,
    "Release and acquire patterns": observation through read-modify-writes).
    """

    to_all: np.ndarray
    to_rank: dict[int, np.ndarray]


class Thread:
    """A program, one of its partitions, or a thread of a rank's host. ``program``: which, in words; "" for the host."""

    def __init__(self, rank: int, slot: int, tick: int, clock: np.ndarray, program: str = "") -> None:
        self.rank, self.slot, self.tick, self.program = rank, slot, tick, program
        # Arrays of clocks are never changed in place: others may hold them.
        self.clock = clock
        # Before Triton 3.9 a release is one thread's of the block. It covers what others did before this clock.
        self._cta_synced: np.ndarray | None = None
        # A relaxed write releases the clock of the last fence. The next fence acquires what relaxed reads have found
        # (PTX ISA, "Release and acquire patterns").
        self._at_fence: np.ndarray | None = None
        self._relaxed_reads = empty()
        # Whether its last acquire added nothing to its clock.
        self.acquired_nothing = False
        self._set_own_tick(tick)

    def _set_own_tick(self, tick: int) -> None:
        if self.clock.shape[1] <= self.slot:
            wider = np.zeros((NUM_ROWS, self.slot + 1), dtype=np.int32)
            wider[:, : self.clock.shape[1]] = self.clock
            self.clock = wider
        else:
            self.clock = self.clock.copy()
        self.clock[:ASYNC_PROXY, self.slot] = tick

    def advance(self) -> None:
        """Begin a new epoch, so that whoever has acquired the clock until now does not come after what follows."""
        self.tick += 1
        self._set_own_tick(self.tick)

    def cta_sync(self) -> None:
        """The threads of the block have met in a barrier: a release by one of them now covers what all have done."""
        self._cta_synced = self.clock

    def fence(self) -> None:
        self.clock = joined_rows(self.clock, self._relaxed_reads, REAL_ACQUIRES)
        self._relaxed_reads = empty()
        self._at_fence = self._cta_synced = self.clock
        self.advance()

    def proxy_fence(self) -> None:
        self.clock = after_proxy_fence(self.clock)
        self.advance()

    def join(self, clock: np.ndarray) -> None:
        """Come after all that ``clock`` comes after."""
        self.clock = joined(self.clock, clock)

    def end_clock(self) -> np.ndarray:
        """What comes before a thread that knows that this one has ended."""
        return self.clock

    def release(self, before: Released | None, is_release: bool, scope: str, whole_cta: bool) -> Released:
        """Write to a word into which ``before`` was released; returns what it holds then.

        ``is_release``: the program asks for a release. ``whole_cta``: it covers what the block's other threads did.
        """
        to_all = before.to_all if before is not None else empty()
        to_rank = before.to_rank if before is not None else {}
        rows = [ALL_RELEASE, RELEASE_AND_ACQUIRE]
        if is_release:
            rows += [ANY_SCOPE, ALL_ACQUIRE]
            mine = self.clock
            if not whole_cta:
                # Only what came before the block's last barrier.
                mine = self.clock.copy()
                mine[REAL_RELEASES] = 0
                if self._cta_synced is not None:
                    mine = joined_rows(mine, self._cta_synced, REAL_RELEASES)
            if scope in REACHES_ALL:
                rows += REAL_SCOPES
            to_all = joined_rows(to_all, mine, rows)
            if scope in REACHES_RANK:
                own = joined_rows(to_rank.get(self.rank, empty()), mine, REAL_SCOPES)
                to_rank = {**to_rank, self.rank: own}
        else:
            to_all = joined_rows(to_all, self.clock, rows)
            if self._at_fence is not None:
                rows = REAL_RELEASES if scope in REACHES_ALL else [ANY_SCOPE, ALL_ACQUIRE]
                to_all = joined_rows(to_all, self._at_fence, rows)
                if scope in REACHES_RANK:
                    own = joined_rows(to_rank.get(self.rank, empty()), self._at_fence, REAL_SCOPES)
                    to_rank = {**to_rank, self.rank: own}
        return Released(to_all, to_rank)

    def acquire(self, released: Released, is_acquire: bool, scope: str, may_wait: bool = True) -> None:
        """Read a word into which this was released.

        ``is_acquire``: the program asks for an acquire. ``may_wait``: a wait may consist of such reads.
        """
        rows, before = [ALL_ACQUIRE, RELEASE_AND_ACQUIRE] if may_wait else [], self.clock
        if is_acquire:
            rows += [ANY_SCOPE, ALL_RELEASE]
            if scope in REACHES_ALL:
                rows += REAL_SCOPES
            if scope in REACHES_RANK and self.rank in released.to_rank:
                self.clock = joined_rows(self.clock, released.to_rank[self.rank], REAL_SCOPES)
        else:
            at_next_fence = REAL_ACQUIRES if scope in REACHES_ALL else [ANY_SCOPE, ALL_RELEASE]
            self._relaxed_reads = joined_rows(self._relaxed_reads, released.to_all, at_next_fence)
            if scope in REACHES_RANK and self.rank in released.to_rank:
                self._relaxed_reads = joined_rows(self._relaxed_reads, released.to_rank[self.rank], REAL_SCOPES)
        self.clock = joined_rows(self.clock, released.to_all, rows)
        # Ticks only grow, so equal sums mean equal clocks.
        self.acquired_nothing = is_acquire and self.clock[AS_WRITTEN].sum() == before[AS_WRITTEN].sum()

    def is_after(self, slot: int, tick: int) -> np.ndarray:
        """By row of the clock: whether that epoch happens before what this thread does now."""
        if slot >= self.clock.shape[1]:
            return np.zeros(NUM_ROWS, dtype=bool)
        return self.clock[:, slot] >= tick


class Operation(Thread):
    """An asynchronous operation, such as a copy: it comes after its issue, and is unordered with what follows that.

    All that it does is one epoch. Operations of a slot end one after the other, but none of them comes after another.
    Only a thread that waits for one comes after those before it, too.
    """

    def __init__(self, issuer: Thread, slot: int, tick: int) -> None:
        super().__init__(issuer.rank, slot, tick, issuer.clock, issuer.program)
        # What comes after its end comes after its epoch. It itself has only the clock of its issue.
        self._end_clock, self.clock = self.clock, issuer.clock

    def advance(self) -> None: ...

    def join(self, clock: np.ndarray) -> None:
        super().join(clock)
        self._end_clock = joined(self._end_clock, clock)

    def end_clock(self) -> np.ndarray:
        return self._end_clock
