"""An access as `races` keeps it, and as a finding shows it."""

from typing import NamedTuple

from iris.observer import READ, UPDATE, WRITE
from iris.sanitizer.events import Place

VERBS = {READ: "reads", WRITE: "writes", UPDATE: "updates"}


class Access(NamedTuple):
    """An access that shadow memory holds, by its number.

    Attributes
    ----------
    thread_slot, tick
        Its epoch (`clocks`).
    kind
        READ, WRITE or UPDATE of `iris.observer`.
    atomic
        The scope of an atomic operation; "" for others.
    host, blank
        Whether the host did it; whether it wrote zeros.
    flag
        Whether a kernel did it, to so few bytes that they may be meant as a flag.
    before
        Of a write: the number of the write before it. Of a read: the number of the same thread's first read since the
        last write.
    readers
        Of a write: the number of the set of accesses that had read what it replaced.
    stale
        Whether the thread's last acquire had brought nothing new.
    async_proxy
        Whether it went through the async proxy (TMA).
    program
        Which program, in words.
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
    program: str = ""


def who_is(place: Place | None, rank: int, program: str) -> str:
    """Who did something at ``place``, in words: a kernel, the host, or a call that goes on beside it."""
    if place is not None and place.call is not None:
        return f"{place.call} of rank {rank}"
    if place is None or place.kernel is None:
        return f"the host of rank {rank}"
    return f"kernel {place.kernel!r} of rank {rank}" + (f", {program}," if program else "")


class Side(NamedTuple):
    """One of the two accesses of a finding. ``program``: which program, in words; "" for the host."""

    rank: int
    verb: str
    place: Place
    program: str = ""

    @classmethod
    def of(cls, access: Access) -> "Side":
        return cls(access.rank, VERBS[access.kind], access.place, access.program)

    def __str__(self) -> str:
        return who_is(self.place, self.rank, self.program)


class Carrier(NamedTuple):
    """A flag, the word at ``offset`` of ``space``: ``reader`` has read there what ``writers`` had written."""

    space: tuple[str, int]
    offset: int
    reader: Side
    writers: tuple[Access, ...]
