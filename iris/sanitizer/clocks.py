"""Which of two things that programs did came first: vector clocks.

Each program, and each rank's host, has a *slot*, and counts up a *tick* there at whatever may be a release. A clock
says of each slot up to which tick all that it did comes before: what slot s did at tick t comes before whoever has
``clock[s] >= t`` (Lamport; Fidge and Mattern; for races: FastTrack, Flanagan and Freund 2009).

There are six clocks at a time. In the first an edge is what the program asked for: a release and an acquire of the
same words, both at a scope that holds the two programs (PTX ISA, "Memory Consistency Model": morally strong, causality
order). The next four take the program for better than it is, each in another way, to find out what a race is for want
of. The last has the edges of the first, and is of what comes before copies by TMA: only what a proxy fence came after.

Such copies go through the async proxy, loads and stores through the generic one, and who accesses memory through two
needs a fence between them (PTX ISA, "Async proxy"). The manual does not say in whose thread: so it counts wherever it
stands on the way from one access to the other, as an alias proxy fence does ("Causality Order"). Launches need none
("Memory synchronization": those by the CUDA API keep the order of proxies), nor does what TMA has written, after which
there is one (an "implicit generic-async proxy fence" where a copy completes).
"""

from typing import NamedTuple

import numpy as np

AS_WRITTEN, ANY_SCOPE, ALL_RELEASE, ALL_ACQUIRE, BOTH, ASYNC_PROXY = range(6)
"""As the program says; each at system scope; besides, each write to a flag a release; each read an acquire; both; as
the program says to TMA."""
HOW = 6

AS_SAID = [AS_WRITTEN, ASYNC_PROXY]
"""The clocks in which scopes are what they are."""

AS_ASKED_RELEASE, AS_ASKED_ACQUIRE = [*AS_SAID, ANY_SCOPE, ALL_ACQUIRE], [*AS_SAID, ANY_SCOPE, ALL_RELEASE]
"""The clocks in which only what is asked for as a release, or as an acquire, is one."""

REACHES_RANK, REACHES_ALL = ("gpu", "sys"), ("sys",)


def empty() -> np.ndarray:
    return np.zeros((HOW, 0), dtype=np.int32)


def joined(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """What comes before either. Neither is changed."""
    if a is b:
        return a
    if a.shape[1] < b.shape[1]:
        a, b = b, a
    result = a.copy()
    np.maximum(result[:, : b.shape[1]], b, out=result[:, : b.shape[1]])
    return result


def merged(target: np.ndarray, source: np.ndarray, how: list[int]) -> np.ndarray:
    """``target`` with ``source`` joined to it in some of the clocks. ``target`` is not changed."""
    width = max(target.shape[1], source.shape[1])
    result = np.zeros((HOW, width), dtype=np.int32)
    result[:, : target.shape[1]] = target
    part = result[how, : source.shape[1]]
    result[how, : source.shape[1]] = np.maximum(part, source[how])
    return result


def fenced(clock: np.ndarray) -> np.ndarray:
    """``clock`` after a proxy fence: what it has comes before copies by TMA, too. It is not changed."""
    result = clock.copy()
    result[ASYNC_PROXY] = result[AS_WRITTEN]
    return result


class Released(NamedTuple):
    """What has been released into a word: to everyone, and to the programs of one rank.

    Of an atomic update the word keeps what was released before, since who reads the update reads on from there (PTX
    ISA, "Release and acquire patterns": observation through read-modify-writes).
    """

    to_all: np.ndarray
    to_rank: dict[int, np.ndarray]


class Thread:
    """A program, or a rank's host, as it goes on. ``program``: which one, in words; nothing for the host."""

    def __init__(self, rank: int, slot: int, tick: int, clock: np.ndarray, program: str = "") -> None:
        self.rank, self.slot, self.tick, self.program = rank, slot, tick, program
        # Not changed once it is here: others may hold it.
        self.clock = clock
        self._cta_synced: np.ndarray | None = None
        # What was known at the last fence, which a relaxed write releases; and what relaxed reads have seen since,
        # which the next one acquires (PTX ISA, "Release and acquire patterns").
        self._fenced: np.ndarray | None = None
        self._seen_relaxed = empty()
        # Whether its last acquire brought nothing that it had not known.
        self.acquired_nothing = False
        self._seen(tick)

    def _seen(self, tick: int) -> None:
        if self.clock.shape[1] <= self.slot:
            wider = np.zeros((HOW, self.slot + 1), dtype=np.int32)
            wider[:, : self.clock.shape[1]] = self.clock
            self.clock = wider
        else:
            self.clock = self.clock.copy()
        self.clock[:ASYNC_PROXY, self.slot] = tick

    def advance(self) -> None:
        """What is done from here on, nobody knows of who has this clock by now."""
        self.tick += 1
        self._seen(self.tick)

    def gather(self) -> None:
        """The threads of the block have met: each now speaks for what all have done."""
        self._cta_synced = self.clock

    def fence(self) -> None:
        self.clock = merged(self.clock, self._seen_relaxed, AS_ASKED_ACQUIRE)
        self._seen_relaxed = empty()
        self._fenced = self._cta_synced = self.clock
        self.advance()

    def fence_proxies(self) -> None:
        self.clock = fenced(self.clock)
        self.advance()

    def learn(self, clock: np.ndarray) -> None:
        self.clock = joined(self.clock, clock)

    def knowledge(self) -> np.ndarray:
        """What who knows of its end knows."""
        return self.clock

    def release(self, before: Released | None, asked: bool, scope: str, whole: bool) -> Released:
        """Into a word in which ``before`` was. ``whole``: for what the block's other threads did, too."""
        to_all = before.to_all if before is not None else empty()
        to_rank = before.to_rank if before is not None else {}
        how = [ALL_RELEASE, BOTH]
        if asked:
            how += [ANY_SCOPE, ALL_ACQUIRE]
            mine = self.clock
            if not whole:
                # Only what came before the last meeting of the block's threads.
                mine = self.clock.copy()
                mine[AS_ASKED_RELEASE] = 0
                if self._cta_synced is not None:
                    mine = merged(mine, self._cta_synced, AS_ASKED_RELEASE)
            if scope in REACHES_ALL:
                how += AS_SAID
            to_all = merged(to_all, mine, how)
            if scope in REACHES_RANK:
                own = merged(to_rank.get(self.rank, empty()), mine, AS_SAID)
                to_rank = {**to_rank, self.rank: own}
        else:
            to_all = merged(to_all, self.clock, how)
            if self._fenced is not None:
                how = AS_ASKED_RELEASE if scope in REACHES_ALL else [ANY_SCOPE, ALL_ACQUIRE]
                to_all = merged(to_all, self._fenced, how)
                if scope in REACHES_RANK:
                    own = merged(to_rank.get(self.rank, empty()), self._fenced, AS_SAID)
                    to_rank = {**to_rank, self.rank: own}
        return Released(to_all, to_rank)

    def acquire(self, released: Released, asked: bool, scope: str, looks: bool = True) -> None:
        """What was in a word that is read. ``looks``: who waits may have done it."""
        how, before = [ALL_ACQUIRE, BOTH] if looks else [], self.clock
        if asked:
            how += [ANY_SCOPE, ALL_RELEASE]
            if scope in REACHES_ALL:
                how += AS_SAID
            if scope in REACHES_RANK and self.rank in released.to_rank:
                self.clock = merged(self.clock, released.to_rank[self.rank], AS_SAID)
        else:
            how_seen = AS_ASKED_ACQUIRE if scope in REACHES_ALL else [ANY_SCOPE, ALL_RELEASE]
            self._seen_relaxed = merged(self._seen_relaxed, released.to_all, how_seen)
            if scope in REACHES_RANK and self.rank in released.to_rank:
                self._seen_relaxed = merged(self._seen_relaxed, released.to_rank[self.rank], AS_SAID)
        self.clock = merged(self.clock, released.to_all, how)
        # Ticks only grow.
        self.acquired_nothing = asked and self.clock[AS_WRITTEN].sum() == before[AS_WRITTEN].sum()

    def knows(self, slot: int, tick: int) -> np.ndarray:
        """In which of the clocks that tick comes before what this thread does now."""
        if slot >= self.clock.shape[1]:
            return np.zeros(HOW, dtype=bool)
        return self.clock[:, slot] >= tick


class Operation(Thread):
    """What a GPU does beside a program, a copy: after what came before it there, and in no order with what follows.

    All that it does is at one tick. Operations of a slot end one after the other, and do not know that of each other.
    """

    def __init__(self, issuer: Thread, slot: int, tick: int) -> None:
        super().__init__(issuer.rank, slot, tick, issuer.clock, issuer.program)
        self._over, self.clock = self.clock, issuer.clock

    def advance(self) -> None: ...

    def learn(self, clock: np.ndarray) -> None:
        super().learn(clock)
        self._over = joined(self._over, clock)

    def knowledge(self) -> np.ndarray:
        return self._over
