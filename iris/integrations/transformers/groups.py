"""The ranks of a device mesh, as operators name them, whatever the backend of their process group."""

import torch
import torch.distributed as dist

from iris.ccl import functional as collectives
from iris.distributed.contexts import context_of
from iris.operators.graph_break import breaks_graph


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
