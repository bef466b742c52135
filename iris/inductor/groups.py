"""Contexts of the process groups that compiled graphs name: one for each group, made when an operator first needs it.

A graph from Inductor's cache runs in a process that has not searched it, so no context can be made at compile time.
"""

import torch
import torch.distributed as dist

from iris import simulator
from iris.ccl.functional import make_contexts_with
from iris.context import Iris
from iris.distributed.group import ProcessGroupBase

_contexts: dict[str, tuple[dist.ProcessGroup, Iris]] = {}


def context_of(group: dist.ProcessGroup) -> Iris:
    """The context of all ranks of ``group``. The first call is collective over the group and blocks the host.

    Groups of the backend "iris" have one. Those of another backend get one of their own, with an empty heap, which
    lasts until there is another group of the same name, as there is after ``torch.distributed.destroy_process_group``.
    """
    if isinstance(group, ProcessGroupBase):
        return group.context(torch.device("cpu" if simulator.ACTIVE else "cuda"))
    of, context = _contexts.get(group.group_name, (None, None))
    if context is None or of is not group:
        if context is not None:
            context._release()
        context = Iris(0, process_group=group)
        _contexts[group.group_name] = group, context
    return context


make_contexts_with(context_of)
