"""Who takes part: ranks, the device of each, and how their hosts talk."""

from iris.errors import names
from iris.world.bootstrap import World, join
from iris.world.group import Group, check_process_group
from iris.world.placement import Placement, choose_device

__all__ = ["Group", "Placement", "World", "check_process_group", "choose_device", "join", "names"]
