"""What a process does for its peers when its program ends.

It writes that it has ended, and by which error, for its next meeting in each group (`Group.say_goodbye`). So peers that
wait there learn it at once. The process that holds the store then stays until its peers have read what they still need.
"""

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

# How long the process with the store waits at most for peers that still read from it. They need milliseconds.
LEAVE_LIMIT_S = 5.0
# How long it keeps the store up after it has written the error that it ends by.
LAST_WORD_S = 0.05
# What a process that ends writes for its next meeting, in the place of what the meeting is for.
ENDED = "the end of the program"
# Characters of an error's text that peers get at most.
LONGEST_TEXT = 500


@dataclass
class Attendance:
    """Tells whether other members may still read what this rank wrote for the last meeting of a group.

    Attributes
    ----------
    store : torch.distributed.Store
        The one that owns the server, if this process does, and not a client: it keeps the server alive.
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
        """Whether every peer has left the last meeting too, or has ended.

        A member that leaves a meeting deletes what it wrote for the one before: these keys are looked for.
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
    """What is needed of an `iris.world.group.Group` when this process, or a peer, ends. (Group imports this file.)"""

    step: str | None

    @property
    def members(self) -> _Members: ...
    def say_goodbye(self, failure: str | None) -> None: ...


# All groups of this process: peers may be waiting in any of them when it ends.
groups: "weakref.WeakSet[_Group]" = weakref.WeakSet()
# For each process group, by name: the attendance of the group over it that met last. One is enough, as a member that
# comes to a meeting has left all earlier ones, also those of other groups over the same process group.
latest: dict[str, Attendance] = {}


def _failure() -> str | None:
    """The error that the program ends by, in words; None if it ends without one, as far as can be known."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if isinstance(error, SystemExit):
        if not error.code:
            return None
        # multiprocessing and the like turn the error of a process's function into SystemExit.
        cause = error.__context__
        error = cause if isinstance(cause, Exception) else error
    return error and f"{type(error).__name__}: {error}"[:LONGEST_TEXT]


def leave(failure: str | None) -> None:
    """Tell the members of all groups that this process ends. ``failure``: the error that it ends by, in words."""
    for group in list(groups):
        with contextlib.suppress(dist.DistError):
            group.say_goodbye(failure)


def _leave_groups(holds_store: bool) -> None:
    failure = _failure()
    leave(failure)
    if holds_store and failure is not None:
        # The store ends with this process. Peers that wait look at it more often than this, so they read the error.
        time.sleep(LAST_WORD_S)
    deadline = time.monotonic() + LEAVE_LIMIT_S
    for attendance in latest.values() if holds_store else ():
        with contextlib.suppress(dist.DistError):
            while not attendance.is_over() and time.monotonic() < deadline:
                time.sleep(1e-3)


@functools.cache
def register(process: int) -> None:
    """Have the process with this number leave its groups when it ends. Cached, so that it is registered once.

    Rank 0 also waits for its peers to leave their last meetings: the store lives with it (if not with torchrun's
    agent), and must not end while they read from it.

    By multiprocessing's Finalize: atexit does not run in processes that multiprocessing forks. These forget what their
    parent has registered, so they register under a number of their own.
    """
    Finalize(None, _leave_groups, args=(dist.get_rank() == 0,), exitpriority=10)
