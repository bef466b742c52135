"""The context of a process group's members, whatever its backend; of operators that name such a group."""

import torch
import torch.distributed as dist

from iris import simulator
from iris.ccl.functional import make_contexts_with
from iris.compat.c10d import existing_groups
from iris.context import Iris
from iris.distributed.group import ProcessGroupBase

# Of groups of other backends. They live until torch destroys the group, since graphs may have captured their memory.
_contexts: dict[dist.ProcessGroup, Iris] = {}


def context_of(group: dist.ProcessGroup, device: torch.device | None = None) -> Iris:
    """The context of the members of ``group``, with an empty heap, on ``device`` or else on the current one.

    The first call for a group is collective over it and blocks the host. In the capture of a CUDA graph it raises
    `FirstUseInCaptureError`.
    """
    if isinstance(group, ProcessGroupBase):
        return group.context(device or torch.device("cpu" if simulator.ACTIVE else "cuda"), "an operator")
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


# Graphs of torch.compile name groups. One from Inductor's cache runs in a process that has not made it, so the context
# is made when an operator first runs.
make_contexts_with(context_of)
