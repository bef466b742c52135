"""The ranks of a device mesh, as operators name them, whatever the backend of their process group."""

import torch
import torch.distributed as dist

from iris.ccl import functional as collectives
from iris.compat.c10d import existing_groups
from iris.context import Iris
from iris.distributed.group import ProcessGroupBase
from iris.operators.graph_break import breaks_graph

# Of groups of other backends. They live until torch destroys the group, since graphs may have captured their memory.
_contexts: dict[dist.ProcessGroup, Iris] = {}


def context_of(group: dist.ProcessGroup, device: torch.device) -> Iris:
    """The context whose ranks are the members of ``group``, with an empty heap.

    The first call for a group is collective over it, blocks the host, and may not be in the capture of a CUDA graph.
    """
    if isinstance(group, ProcessGroupBase):
        return group.context(device, "forward")
    _forget_destroyed_groups()
    if group not in _contexts:
        _contexts[group] = Iris(0, process_group=group)
    return _contexts[group]


def _forget_destroyed_groups() -> None:
    there = existing_groups()
    for group in [group for group in _contexts if group not in there]:
        context = _contexts.pop(group)
        if context.device.type == "cuda":
            torch.cuda.synchronize(context.device)
        context._release()


class Ranks:
    """The members of a process group, whose context is made when it is first used."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._name: str | None = None

    def name(self, device: torch.device) -> str:
        """What operators call them. The first call is collective, as of `context_of`."""
        return self._name or self._find(device)

    @breaks_graph("the first forward on this device makes a context, for which ranks meet on the host")
    def _find(self, device: torch.device) -> str:
        self._name = collectives.name_of(context_of(self._group, device))
        return self._name
