"""How a process takes leave of its peers when its program ends, and what it says of the reason."""

import contextlib
import functools
import sys
import time
import weakref
from dataclasses import dataclass
from multiprocessing.util import Finalize
from typing import Protocol

import torch.distributed as dist

from iris.world.peers import Peer

# How long a process that ends waits for peers that are still reading what it sent: they need milliseconds.
LEAVE_LIMIT_S = 5.0
# For how long the last word of the process with the store can be read.
LAST_WORD_S = 0.05
# What a process that ends writes in the place of its next meeting's purpose.
ENDED = "the end of the program"
# Characters of an error's text that peers get at most.
LONGEST_TEXT = 500


@dataclass
class Attendance:
    """The meetings of one group as far as others still read what this rank has brought to them.

    Attributes
    ----------
    store : torch.distributed.Store
        Not the group's own client: this one keeps the server alive where the process holds it.
    members : list of Peer or None
        By rank in the group; None for this rank and those that have not introduced themselves.
    rank : int
    latest : int
        The number of the last meeting that this rank has left.
    """

    store: dist.Store
    members: list[Peer | None]
    rank: int
    latest: int = -1

    def is_over(self) -> bool:
        """Whether every peer has left the last meeting too, or is gone.

        Whoever leaves a meeting deletes what it brought to the one before.
        """
        return not any(
            self.store.check([f"{self.latest - 1}/{rank}"])
            for rank, peer in enumerate(self.members)
            if rank != self.rank and not (peer is not None and peer.ended)
        )


class _Members(Protocol):
    processes: list[Peer | None]

    def report_end(self, peer: Peer) -> None: ...


class _Group(Protocol):
    """What others need of an `iris.world.group.Group` when a process ends: its own, or a peer."""

    step: str | None

    @property
    def members(self) -> _Members: ...
    def say_goodbye(self, failure: str | None) -> None: ...


# All groups of this process: peers may be waiting in any of them when it ends.
groups: "weakref.WeakSet[_Group]" = weakref.WeakSet()
# By the name of a process group, of the group over it that met last: whoever comes to a meeting has left all earlier
# ones, also those of other groups over the same process group.
latest: dict[str, Attendance] = {}


def _failure() -> str | None:
    """What the program ends by, in words; None if it ends well as far as it knows."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if isinstance(error, SystemExit):
        if not error.code:
            return None
        # Whoever starts a function in a process turns its error into this one.
        cause = error.__context__
        error = cause if isinstance(cause, Exception) else error
    return error and f"{type(error).__name__}: {error}"[:LONGEST_TEXT]


def leave(failure: str | None) -> None:
    """Let the members of all groups know that this process comes no more. ``failure``: what it ends by, in words."""
    for group in list(groups):
        with contextlib.suppress(dist.DistError):
            group.say_goodbye(failure)


def _leave_groups(stays: bool) -> None:
    failure = _failure()
    leave(failure)
    if stays and failure is not None:
        # The store goes with it, and this is the last that others can read there. They look more often than that.
        time.sleep(LAST_WORD_S)
    deadline = time.monotonic() + LEAVE_LIMIT_S
    for attendance in latest.values() if stays else ():
        with contextlib.suppress(dist.DistError):
            while not attendance.is_over() and time.monotonic() < deadline:
                time.sleep(1e-3)


@functools.cache
def register(process: int) -> None:
    """When the process of this number ends, its peers learn it, and rank 0 waits for them to leave their last meetings.

    The store lives with rank 0 (if not with torchrun's agent), and must not end under peers that read it. The others
    need nothing of each other.

    Not by atexit, which processes that multiprocessing forks do not run; and such a process forgets what its parent has
    registered.
    """
    Finalize(None, _leave_groups, args=(dist.get_rank() == 0,), exitpriority=10)
