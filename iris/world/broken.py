"""Whether a group has been broken on another host, for ranks that wait there for something other than a meeting."""

import contextlib

import torch.distributed as dist

from iris.world import wire
from iris.world.group import BROKEN, Group


def look_at_others(group: Group) -> None:
    """Break the group here, if another of its ranks has. Who does so says it in the place of the next meeting."""
    for rank in range(group.size):
        key = f"{group.meetings}/{rank}"
        # What is of another version of Iris, or a store that is gone, the next meeting reports.
        with contextlib.suppress(TypeError, ValueError, dist.DistError):
            if rank != group.rank and group.store.check([key]):
                come_for, why = wire.decode(group.store.get(key))
                if come_for == BROKEN:
                    group.break_off(why)
