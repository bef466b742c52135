"""Who takes part: ranks, the device of each, and how their hosts talk."""

from iris.errors import names
from iris.world.bootstrap import World, join, narrow
from iris.world.group import Group, check_process_group
from iris.world.hosts import Hosts
from iris.world.links import Links
from iris.world.placement import Placement, choose_device
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
    "names",
    "narrow",
]
