"""Who takes part: the ranks, the host and device of each, and how they talk outside of kernels.

`bootstrap.join` makes a `World`: everything here, for one rank. It has three ways to talk:

* A `Group` meets on the host, through the key-value store of torch.distributed (`group`, `store`, `wire`). A *meeting*
  is an all_gather of small values that also finds out whether all ranks are at the same call.
* A `Rail` carries bytes between hosts, for the ranks of one local rank (`rail`, with `gloo_rail` or `nccl_rail`).
* A `Link` carries send and recv between two ranks of different hosts (`links`).

Within a host, data go through the heap's memory, which is not here (`iris.heap`).

So that nobody waits for a rank that is dead, `members` knows the processes of a group's ranks. `peers` notes when one
of this host has ended, `remote_peers` when one of another host has, and `strangers` judges those that are not known
yet. By `farewell` a process that ends says so itself.
"""

from iris.world.bootstrap import World, join, narrow
from iris.world.group import Group
from iris.world.hosts import Hosts
from iris.world.links import Links
from iris.world.placement import Placement, choose_device
from iris.world.process_group import check_process_group
from iris.world.rail import Rail

__all__ = [
    "Group",
    "Hosts",
    "Links",
    "Placement",
    "Rail",
    "World",
    "check_process_group",
    "choose_device",
    "join",
    "narrow",
]
