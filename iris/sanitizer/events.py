"""The events that a rank records while it runs, and that `iris.sanitizer.analysis` reads.

A rank's events are in the order in which it did them. Operations that order ranks, such as atomic ones, also have a
number from one counter of all ranks.

Many events say who did something by two numbers: ``launch`` and ``program``.

* A launch's number counts from 1. 0 stands for the host.
* A program's number counts from 1, first the programs of the grid, then their partitions.
* An asynchronous operation, such as a copy by TMA, has a negative number in place of a program's.
* A thread of the host has a number too: `HOST` for the one that made the context, others from 1.
"""

import operator
from typing import NamedTuple

import numpy as np

from iris.simulator.lines import Line

HOST = 0
"""The number of the host's thread that made the context."""

PRIVATE = "private"
"""The name, in a space, of memory that one process has for itself. Offsets are then addresses."""


_COMPARISONS = {name: getattr(operator, name) for name in ("eq", "ne", "gt", "ge", "lt", "le")}


class Place(NamedTuple):
    """Where something was done. Each rank numbers its places, and events name them by number.

    ``kernel``: its name, or None for the host. ``caller``: in a kernel of the library, the line that called the
    library; in a function that a kernel calls, the kernel's line. ``call``: the asynchronous call that did it, in
    words, if one did; ``line`` is then the one that made the call.
    """

    kernel: str | None
    line: Line
    caller: Line | None = None
    call: str | None = None


class Spans(NamedTuple):
    """Bytes of one space: from each of ``begins`` up to that of ``ends``. These are offsets, ascending.

    ``space``: a name and a rank. It is that rank's part of a mapping that several ranks share, or, with the name
    `PRIVATE`, all other memory of the rank.
    """

    space: tuple[str, int]
    begins: np.ndarray
    ends: np.ndarray


class Known(NamedTuple):
    """From here on, this number names this place."""

    number: int
    place: Place


class Allocated(NamedTuple):
    """A tensor of this rank. ``text``: the tensor, in words. ``undefined``: nobody has written it.

    ``new``: its memory is new, so that what was there before is to be forgotten. It is False for an argument of a
    kernel while several threads run; then `Renewed` says which memory is new.
    """

    spans: Spans
    text: str
    place: int
    undefined: bool
    new: bool = True


class Renewed(NamedTuple):
    """Private memory of this process is new: what was there before is to be forgotten."""

    spans: Spans


class Launched(NamedTuple):
    """A launch begins. ``dims``: the grid. ``thread``: the host's thread that launches."""

    launch: int
    dims: tuple[int, int, int] = (1, 1, 1)
    thread: int = HOST

    def program_text(self, number: int) -> str:
        """The program or partition of this number, in words."""
        (columns, rows, layers), index = self.dims, number - 1
        partition, index = divmod(index, columns * rows * layers)
        text = f"program {(index % columns, index // columns % rows, index // (columns * rows))}"
        return f"partition {partition} of {text}" if partition else text


class Finished(NamedTuple):
    """All programs of a launch have ended, and the host's ``thread`` has waited for that."""

    launch: int
    thread: int = HOST


class HostRelease(NamedTuple):
    """A thread of the host releases into a lock, an event, a queue or the like, which this key names."""

    thread: int
    key: int


class HostAcquire(NamedTuple):
    """A thread of the host acquires what was released there."""

    thread: int
    key: int


class Accessed(NamedTuple):
    """A load or store of a program, or an access of the host by torch.

    Attributes
    ----------
    kind
        READ, WRITE or UPDATE of `iris.observer`.
    undefined
        The values that were read look as if nobody had written them.
    blank
        The host wrote zeros.
    number
        As of `Synchronised`: for the read of a single element, which may be meant as a look at a flag.
    async_proxy
        It went through the async proxy (TMA).
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
    """A wait for a flag of so many bits that compares as ``cmp`` to ``wanted``, see `DeviceContext.wait`."""

    cmp: str
    wanted: int
    bits: int

    def ends_at(self, value: int) -> bool:
        """Whether the wait ends when the flag holds ``value``."""
        if self.cmp == "reached":
            return (value - self.wanted) % (1 << self.bits) < 1 << (self.bits - 1)
        return _COMPARISONS[self.cmp](value, self.wanted)


class Synchronised(NamedTuple):
    """An access that synchronises: an atomic operation, or an access to data that contain their own flag.

    Attributes
    ----------
    number
        Its place among those of all ranks.
    kind
        READ, WRITE or UPDATE of `iris.observer`.
    releases, acquires, scope
        What the program asks for. ``scope`` is "cta", "gpu" or "sys".
    message
        It is of data that contain their own flag (LL and Lamport protocols).
    whole_cta
        As a release it covers what all threads of the block did before.
    undefined
        As of `Accessed`.
    may_wait
        A wait may consist of such operations. A release that adds or exchanges is none.
    before, after
        The values before and after it, if it is of a single word.
    wait
        The wait that it is part of, if what ends that is known.
    async_proxy
        It went through the async proxy (TMA).
    adds
        It adds to the value, so that the difference does not depend on it.
    dropped
        Nobody uses what it returns.
    once
        The host looks once, and does not wait.
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
    whole_cta: bool = True
    undefined: bool = False
    may_wait: bool = True
    before: int | None = None
    after: int | None = None
    wait: Wait | None = None
    async_proxy: bool = False
    adds: bool = False
    dropped: bool = False
    once: bool = False


class CtaSynced(NamedTuple):
    """The threads of a program have met in a barrier (``__syncthreads``)."""

    launch: int
    program: int


class Forked(NamedTuple):
    """A program's ``partitions`` begin, beside its default partition, which keeps the program's number."""

    launch: int
    program: int
    partitions: tuple[int, ...]


class Joined(NamedTuple):
    """All ``partitions`` of a program have ended, and it goes on after them."""

    launch: int
    program: int
    partitions: tuple[int, ...]


class Issued(NamedTuple):
    """A program has issued an asynchronous operation, such as a copy. From here on it acts as ``operation``.

    ``key``: the mbarrier that signals its end, or None. Operations of a program that have the same key end in order.
    """

    launch: int
    program: int
    operation: int
    key: int | None


class Awaited(NamedTuple):
    """A program, or another operation, has waited for ``operation``."""

    launch: int
    program: int
    operation: int


class MbarrierArrive(NamedTuple):
    """A program or an operation arrives at the mbarrier that ``key`` names. ``ends``: this ends the phase."""

    launch: int
    program: int
    key: tuple
    ends: bool


class MbarrierWait(NamedTuple):
    """A program has waited for a phase of the mbarrier."""

    launch: int
    program: int
    key: tuple


class Fenced(NamedTuple):
    """A memory fence of a program, at system scope."""

    launch: int
    program: int


class ProxyFenced(NamedTuple):
    """A proxy fence of a program: orders earlier loads and stores before later copies by TMA."""

    launch: int
    program: int


class CollectiveEnter(NamedTuple):
    """The host enters a collective, or sends a message, which ``key`` names, and goes on.

    ``last``: a deadlock of all ranks had been found before.
    """

    key: tuple
    last: bool = False
    thread: int = HOST


class Awaiting(NamedTuple):
    """The host waits until all ``ranks`` have entered or sent; if there are none, until any rank has sent.

    ``text``: the collective or message, in words. ``last``: as in `CollectiveEnter`.
    """

    key: tuple
    ranks: tuple[int, ...]
    place: int
    text: str
    last: bool


class CollectiveDone(NamedTuple):
    """The collective is done, for this rank: what ``ranks`` did before they entered happens before what follows.

    ``ranks``: those whose data this rank has got. ``receivers``: how many ranks get any data, and so have this event.
    Since `CollectiveEnter`, kernels of other threads may have run.
    """

    key: tuple
    ranks: tuple[int, ...]
    receivers: int
    thread: int = HOST


class SharedRace(NamedTuple):
    """A race between two accesses to a program's shared memory. Each is a partition, a verb and the number of a place.

    ``program``: that of the second, in words. ``missing``: what would order them, in words.
    """

    kind: str
    program: str
    first: tuple[int | None, str, int]
    second: tuple[int | None, str, int]
    missing: str


class Diagnostic(NamedTuple):
    """A mistake that needs no analysis: a rank has found it while it ran. ``place``: None if there is none to name.

    ``program``: which one, in words. ``places``: of a mistake that all ranks make together, where each makes it.
    """

    kind: str
    text: str
    place: int | None
    program: str = ""
    places: tuple[tuple[int, Line], ...] = ()


class Waiting(NamedTuple):
    """In a deadlock: programs that wait, or the host. ``text``: for what, in words. ``flag``: the flag, in words.

    ``outside``: the flag is in no tensor, which is reported as a mistake of its own.
    """

    kernel: str | None
    programs: str
    text: str
    place: Place
    flag: str
    outside: bool = False
