"""An access that the analysis has met, and what a finding says of one."""

from typing import NamedTuple

from iris.observer import READ, UPDATE, WRITE
from iris.sanitizer.events import Place

VERBS = {READ: "reads", WRITE: "writes", UPDATE: "updates"}


class Access(NamedTuple):
    """What the shadow's numbers stand for.

    ``atomic``: at which scope it is, or nothing. ``blank``: the host's zeros. ``flag``: a kernel's access to so few
    bytes that they may be meant as one. ``before``: the write that this one wrote over; of a read, the first one by the
    same program of what was there then. ``readers``: of a write, the set of those who had read what it wrote over.
    ``stale``: the program's last wait brought nothing new. ``async_proxy``: by TMA. ``program``: which one, in words.
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
    if place is not None and place.call is not None:
        return f"{place.call} of rank {rank}"
    if place is None or place.kernel is None:
        return f"the host of rank {rank}"
    return f"kernel {place.kernel!r} of rank {rank}" + (f", {program}," if program else "")


class Side(NamedTuple):
    """One of the accesses of a finding. ``program``: which of its kernel's, in words; nothing for the host."""

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
    """The word at ``offset`` of ``space``, at which ``reader`` has looked when ``writers`` had written it."""

    space: tuple[str, int]
    offset: int
    reader: Side
    writers: tuple[Access, ...]
