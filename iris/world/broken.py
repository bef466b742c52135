"""Whether another rank has broken the group, for ranks that wait for something other than a meeting.

On one host the abort flag says so (`iris.runtime.abort`). Ranks of other hosts find it in the store alone.
"""

import contextlib

import torch.distributed as dist

from iris.world import wire
from iris.world.group import BROKEN, Group


def break_if_others_have(group: Group) -> None:
    """Break the group on this rank, too, if another rank has. That one has written it for its next meeting."""
    for rank in range(group.size):
        key = f"{group.meetings}/{rank}"
        # If the key is of another version of Iris, or the store is gone, the next meeting reports it.
        with contextlib.suppress(TypeError, ValueError, dist.DistError):
            if rank != group.rank and group.store.check([key]):
                purpose, why = wire.decode(group.store.get(key))
                if purpose == BROKEN:
                    group.break_off(why)
