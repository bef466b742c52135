"""What a rank notes down while it runs, for `iris.sanitizer.analysis` to read.

A rank's events are in the order in which it did them: one thread of it runs at a time. What orders ranks, an atomic
operation or a word that carries its own arrival, has a number besides, from one counter of all ranks.
"""

import operator
from typing import NamedTuple

import numpy as np

from iris.simulator.lines import Line

HOST = 0
"""In the place of a program's number, which counts from 1: what the host does with torch.

Events of the host's are of launch 0; other threads of Python than the one that made the context have numbers from 1.
"""

PRIVATE = "private"
"""In the place of a mapping's name: memory of one process alone, whose offsets are its addresses."""


_COMPARISONS = {name: getattr(operator, name) for name in ("eq", "ne", "gt", "ge", "lt", "le")}


class Place(NamedTuple):
    """Where something was done. A rank numbers its places; events name them by number.

    ``caller``: of what the library's kernels do, the line that called the library; of what a kernel's functions do,
    the line of the kernel. ``call``: that goes on beside its thread, in words; the line is the one that made it.
    """

    kernel: str | None
    line: Line
    caller: Line | None = None
    call: str | None = None


class Spans(NamedTuple):
    """Bytes of one space: from each of ``begins`` to each of ``ends``, offsets, ascending.

    ``space``: the memory of one rank in a mapping that a group shares, or of one process alone.
    """

    space: tuple[str, int]
    begins: np.ndarray
    ends: np.ndarray


class Known(NamedTuple):
    """The place that has this number from here on."""

    number: int
    place: Place


class Allocated(NamedTuple):
    """Memory of this rank. ``text``: its tensor; ``undefined``: nobody has written it.

    ``new``: whatever was there before is gone. It is False for a kernel's argument where several threads are at work:
    `Renewed` notes new memory then.
    """

    spans: Spans
    text: str
    place: int
    undefined: bool
    new: bool = True


class Renewed(NamedTuple):
    """New memory of this process alone, whatever was there before."""

    spans: Spans


class Launched(NamedTuple):
    """``dims``: of the grid; ``thread``: the host's that launches."""

    launch: int
    dims: tuple[int, int, int] = (1, 1, 1)
    thread: int = HOST

    def program_text(self, number: int) -> str:
        """The program of this number, in words. Those of partitions follow those of the programs."""
        (columns, rows, layers), index = self.dims, number - 1
        partition, index = divmod(index, columns * rows * layers)
        text = f"program {(index % columns, index // columns % rows, index // (columns * rows))}"
        return f"partition {partition} of {text}" if partition else text


class Finished(NamedTuple):
    """All programs of a launch are over, and its thread of the host knows it."""

    launch: int
    thread: int = HOST


class HostRelease(NamedTuple):
    """A thread of the host releases what it knows: by a lock, an event, a queue or the like, which has this key."""

    thread: int
    key: int


class HostAcquire(NamedTuple):
    """A thread acquires what others have released there."""

    thread: int
    key: int


class Accessed(NamedTuple):
    """A load or store, or the host's with torch.

    ``undefined``: what was read looks as if nobody had written it. ``blank``: the host made it zeros. ``number``: as of
    `Synchronised`, for the read of a single element, which may be meant as a look at a flag. ``async_proxy``: by TMA.
    """

    launch: int
    program: int
    place: int
    spans: Spans
    kind: int
    undefined: bool = False
    blank: bool = False
    number: int | None = None
    async_proxy: bool = False


class Wait(NamedTuple):
    """For a flag of so many bits that compares as ``cmp`` to ``wanted``, see `DeviceContext.wait`."""

    cmp: str
    wanted: int
    bits: int

    def ends_at(self, value: int) -> bool:
        if self.cmp == "reached":
            return (value - self.wanted) % (1 << self.bits) < 1 << (self.bits - 1)
        return _COMPARISONS[self.cmp](value, self.wanted)


class Synchronised(NamedTuple):
    """An access that others may do at the same time: an atomic one, or of words that carry their own arrival.

    ``number``: its place among those of all ranks. ``releases``, ``acquires``: as it was asked for, with ``scope``:
    "cta", "gpu" or "sys". ``message``: words that carry their own arrival. ``gathered``: what other threads of the
    block did before is released too. ``undefined``: as of `Accessed`. ``looks``: who waits may do this; a release that
    adds to what is there, or takes its place, is no look. ``before``, ``after``: what a word held and holds, if it is
    one. ``wait``: for what it is read. ``async_proxy``: by TMA. ``adds``: an update that adds to what is there.
    ``dropped``: nobody uses what it returns. ``once``: the host looks, and does not wait.
    """

    number: int
    launch: int
    program: int
    place: int
    spans: Spans
    kind: int
    releases: bool
    acquires: bool
    scope: str
    message: bool = False
    gathered: bool = True
    undefined: bool = False
    looks: bool = True
    before: int | None = None
    after: int | None = None
    wait: Wait | None = None
    async_proxy: bool = False
    adds: bool = False
    dropped: bool = False
    once: bool = False


class Gathered(NamedTuple):
    """The threads of a program have met."""

    launch: int
    program: int


class Forked(NamedTuple):
    """A program goes on beside ``partitions`` of it, which have numbers like programs."""

    launch: int
    program: int
    partitions: tuple[int, ...]


class Joined(NamedTuple):
    """All ``partitions`` of a program are done."""

    launch: int
    program: int
    partitions: tuple[int, ...]


class Issued(NamedTuple):
    """A program has issued what a GPU does beside it, a copy: from here on, and as ``operation``, like a program.

    ``key``: of those that have the same one, each ends before the next; another one for each mbarrier that signals the
    end, or None.
    """

    launch: int
    program: int
    operation: int
    key: int | None


class Awaited(NamedTuple):
    """A program, or an operation, knows that ``operation`` is over."""

    launch: int
    program: int
    operation: int


class MbarrierArrive(NamedTuple):
    """A program, one of its partitions, or an operation, arrives at an mbarrier; ``ends``: that ends its phase.

    ``key``: another one for each mbarrier.
    """

    launch: int
    program: int
    key: tuple
    ends: bool


class MbarrierWait(NamedTuple):
    """A program, or one of its partitions, has waited for a phase of the mbarrier."""

    launch: int
    program: int
    key: tuple


class Fenced(NamedTuple):
    """A program orders all that it did before all that it will do, at system scope."""

    launch: int
    program: int


class ProxyFenced(NamedTuple):
    """A program orders what comes before it, by loads and stores, before the copies by TMA that it will issue."""

    launch: int
    program: int


class CollectiveEnter(NamedTuple):
    """The host enters a collective, or sends a message, and goes on. Each has a ``key`` of its own.

    ``last``: no rank could go on any more when it did.
    """

    key: tuple
    last: bool = False
    thread: int = HOST


class Awaiting(NamedTuple):
    """The host waits until ``ranks`` have entered, or sent; any, if there are none.

    ``text``: for what, in words. ``last`` as in `CollectiveEnter`.
    """

    key: tuple
    ranks: tuple[int, ...]
    place: int
    text: str
    last: bool


class CollectiveDone(NamedTuple):
    """The collective is done: what ``ranks`` did before they entered comes before what the host does from here on.

    Between the two events a kernel may have run that another thread has launched. ``ranks``: those that this rank got
    data of. ``receivers``: how many ranks get data of any other, and so have this event.
    """

    key: tuple
    ranks: tuple[int, ...]
    receivers: int
    thread: int = HOST


class SharedRace(NamedTuple):
    """Two accesses to a program's shared memory: by which partition, what it does, and where; and what is missing.

    ``program``: that of the second, in words.
    """

    kind: str
    program: str
    first: tuple[int | None, str, int]
    second: tuple[int | None, str, int]
    missing: str


class Diagnostic(NamedTuple):
    """A mistake that shows on one rank alone. ``place``: None if there is none to name.

    ``program``: which one, in words. ``places``: of a mistake that all ranks make together, where each does.
    """

    kind: str
    text: str
    place: int | None
    program: str = ""
    places: tuple[tuple[int, Line], ...] = ()


class Waiting(NamedTuple):
    """A program that waits, or the host, when nobody can go on any more. ``flag``: what it waits for, in words.

    ``outside``: it waits for what is in no tensor, which is reported as a mistake of its own.
    """

    kernel: str | None
    programs: str
    text: str
    place: Place
    flag: str
    outside: bool = False
