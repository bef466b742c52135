"""How a process takes leave of its peers when its program ends."""

import contextlib
import functools
import sys
import time
import weakref
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from iris.world.group import Group

# How long a process that ends waits for peers that are still reading what it sent: they need milliseconds.
LEAVE_LIMIT_S = 5.0
# What a process that has ended meets for.
ENDED = "the end of the program"

# All of the process: peers may be waiting in any of them when it ends.
groups: "weakref.WeakSet[Group]" = weakref.WeakSet()
# The group that met last, by process group. Whoever comes to a meeting has left all earlier ones.
latest: "dict[str, Group]" = {}


def _leave_groups(stays: bool) -> None:
    # If the program has failed, its launcher tells the cause and ends the other ranks. That this one does not come must
    # not be told in its place.
    if sys.exc_info()[0] is None and not hasattr(sys, "last_value"):
        for group in groups:
            with contextlib.suppress(dist.DistError):
                group.say_goodbye()
    deadline = time.monotonic() + LEAVE_LIMIT_S
    for group in latest.values() if stays else ():
        with contextlib.suppress(dist.DistError):
            group.leave(deadline)


@functools.cache
def register(process: int) -> None:
    """When the process of this number ends, it tells its peers, and rank 0 waits for them to leave their last meetings.

    The store lives with rank 0 (if not with torchrun's agent), and must not end under peers that read it. The others
    need nothing of each other.

    Not by atexit, which processes that multiprocessing forks do not run; and such a process forgets what its parent has
    registered.
    """
    Finalize(None, _leave_groups, args=(dist.get_rank() == 0,), exitpriority=10)
