"""What a context keeps for each process group that it was used with: who its members are, and the library's memory.

Groups need not be known beforehand. At its first use the members of a group meet, those of each host set aside memory
that they map, and where there are several hosts, they make rails of their own (`iris.world.rail`).
"""

import torch
import torch.distributed as dist

from iris.compat.c10d import existing_groups
from iris.failures.device_record import DeviceRecord
from iris.runtime.workspace import Workspace
from iris.world import Group, World, check_process_group, narrow
from iris.world.hosts import link_aborts
from iris.world.process_group import check_among, ranks_of
from iris.world.rail import Timer, time_rails


class ProcessGroups:
    """The groups of a context, which `iris.context.Iris` is; None stands for all ranks.

    Attributes
    ----------
    _groups : dict
        The members, who meet on the host.
    _workspaces : dict
        Of groups that were used on the device: their memory. Its kernels reach the ranks of this host alone, so the
        workspace of a group over several hosts is that of its members on this one.
    _spanning : dict
        Those over several hosts, with their hosts and this rank's rail.
    """

    def __init__(self, everyone: World, record: DeviceRecord) -> None:
        """Collective; blocks the host. ``record``: where kernels note why they gave up."""
        self._world, self._record = everyone, record
        self._groups: dict[dist.ProcessGroup | None, Group] = {None: everyone.group}
        self._spanning: dict[dist.ProcessGroup | None, World] = {}
        self._timer: Timer | None = None
        self._workspaces: dict[dist.ProcessGroup | None, Workspace] = {None: self._set_aside(everyone)}
        if everyone.rail:
            self._spanning[None] = everyone

    def _named(self, process_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
        """None if the process group is that of all ranks of this context, else the process group itself.

        In a context of all ranks of the program that is torch's default group; in one of fewer ranks it is not.
        """
        return None if process_group is self._world.group.process_group else process_group

    def _group(self, process_group: dist.ProcessGroup | None) -> Group:
        if process_group is None:
            return self._groups[None]
        check_process_group(process_group)
        if process_group not in self._groups:
            # Before it is made, as its ranks count the groups that they make.
            check_among(ranks_of(process_group), self._world.group.ranks)
            self._groups[process_group] = Group(process_group)
        return self._groups[process_group]

    def _workspace(self, process_group: dist.ProcessGroup | None) -> Workspace:
        """The group's memory on this host. The first call for a group is collective and blocks the host."""
        if process_group not in self._workspaces:
            self._forget_destroyed_groups()
            members = self._group(process_group)
            if self._world.rail is None:
                self._workspaces[process_group] = Workspace(members, self._world.device, self._record)
                return self._workspaces[process_group]
            part = narrow(self._world, members)
            try:
                self._workspaces[process_group] = self._set_aside(part)
            except BaseException:
                part.disconnect()
                raise
            if part.rail:
                time_rails(part.group, self._timer)
                self._spanning[process_group] = part
        return self._workspaces[process_group]

    def _set_aside(self, part: World) -> Workspace:
        """On all hosts, or on none."""
        made: list[Workspace] = []

        def set_aside() -> None:
            made.append(Workspace(part.hosts.group, part.device, self._record))

        if part.rail is None:
            set_aside()
        else:
            try:
                part.group.agree(set_aside, "set aside memory for a group over several hosts")
            except BaseException:
                for workspace in made:
                    workspace.close()
                raise
            link_aborts(part.group, part.hosts.group)
        return made[0]

    def _time_rails(self, timer: Timer) -> None:
        """Have this timer note every transfer of the rails from here on, also of those that will be made. Local."""
        self._timer = timer
        for spanning in self._spanning.values():
            time_rails(spanning.group, timer)

    def _check_whole(self, process_group: dist.ProcessGroup | None) -> None:
        """Raise `GroupAbortedError` if the group is broken."""
        if process_group in self._workspaces:
            self._workspaces[process_group].abort_flag.check()
        if process_group in self._groups:
            self._groups[process_group].check()

    def _forget_destroyed_groups(self) -> None:
        """Give back the memory of groups that torch has destroyed."""
        there = existing_groups()
        gone = [group for group in self._groups if group is not None and group not in there]
        if gone and self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)
        for group in gone:
            self._forget(group)

    def _forget(self, group: dist.ProcessGroup) -> None:
        """Give back what a group has. Local. The caller guarantees that this rank's kernels of it are over."""
        del self._groups[group]
        workspace = self._workspaces.pop(group, None)
        if workspace is not None:
            workspace.close()
        spanning = self._spanning.pop(group, None)
        if spanning is not None:
            spanning.disconnect()

    def _close_groups(self) -> None:
        """Give all memory back, and let go of all rails. Local. This rank's kernels are over."""
        for workspace in self._workspaces.values():
            workspace.close()
        for spanning in self._spanning.values():
            spanning.disconnect()
