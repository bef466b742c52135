"""Process groups of torch.distributed: what its public functions do not say or set.

All of these parts are there in torch 2.9 to 2.13. Where one is gone, its call raises `MissingPartError`. Two parts are
for the sanitizer alone, and it does without them: without `torch._C.Future` it sees futures that Python made and none
that C++ made. If it cannot tell that a call comes from torch's own Python, it takes the call for one that the program
waits for at once. Windows, and their attributes, are new in torch 2.14.
"""

import inspect
from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist

from iris.compat.parts import function, member, optional, required

_MEETS = "let the ranks of a process group meet"
_OVER_HOSTS = "move data between hosts"
_BESIDE = "make a group for tensors on the CPU beside a GPU"

store_of = function("torch.distributed.distributed_c10d:_get_process_group_store", _MEETS)
"""The store of a process group."""

default_store = function("torch.distributed.distributed_c10d:_get_default_store", _MEETS)
"""The store of the default group."""

group_named = function(
    "torch.distributed.distributed_c10d:_resolve_process_group", "see who takes part in a collective"
)
"""The process group with this name."""

Future = optional("torch._C:Future") or torch.futures.Future
"""The base class of all futures, also of those that C++ makes."""

_SOURCE = optional("torch.distributed.distributed_c10d:__file__")
# From torch 2.14 on.
_WindowAttr = optional("torch._C._distributed_c10d:WindowAttr")
_WindowAccessType = optional("torch._C._distributed_c10d:WindowAccessType")
_SPLIT_GROUP = inspect.unwrap(dist.split_group).__code__


def is_of_torch_distributed(code: CodeType) -> bool:
    """Whether this code is of the Python functions of torch.distributed that programs call."""
    return code.co_filename == _SOURCE


def is_split_group(code: CodeType) -> bool:
    """Whether this code is that of `torch.distributed.split_group`, without its decorators."""
    return code is _SPLIT_GROUP


def goes_on_by_itself(given: Mapping[str, Any]) -> bool:
    """Whether the operation of a collective leaves the wait to the caller. ``given``: its arguments by name.

    The argument is ``asyncOp`` in torch 2.11, and ``async_op`` in 2.13. Where it is not given, the caller waits.
    """
    return given.get("async_op", given.get("asyncOp")) is not False


def existing_groups() -> Any:
    """The process groups that have not been destroyed, as the keys of a mapping."""
    return required("torch.distributed.distributed_c10d:_world.pg_map", "notice that a process group was destroyed")


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The backend of a group for tensors on this device."""
    return member(group, "torch.distributed:ProcessGroup._get_backend", "find a process group's backend")(device)


def set_backend(group: dist.ProcessGroup, device: torch.device, kind: Any, backend: Any) -> None:
    """Make ``backend`` the group's backend for tensors on this device, and for calls without tensors.

    ``kind``: its `torch.distributed.ProcessGroup.BackendType`.
    """
    member(group, "torch.distributed:ProcessGroup._register_backend", _BESIDE)(device, kind, backend)
    member(group, "torch.distributed:ProcessGroup._set_default_backend", _BESIDE)(kind)


def all_gather(backend: Any, output: torch.Tensor, input: torch.Tensor) -> Any:
    """Begin to gather every rank's ``input`` into one tensor, by a backend. Returns torch's work."""
    gather = member(backend, "torch._C._distributed_c10d:Backend._allgather_base", _OVER_HOSTS)
    return gather(output, input)


def reduce_scatter(backend: Any, output: torch.Tensor, input: torch.Tensor, options: Any) -> Any:
    """Begin to combine every rank's ``input``; each rank gets a part. Returns torch's work."""
    return member(backend, "torch._C._distributed_c10d:Backend._reduce_scatter_base", _OVER_HOSTS)(
        output, input, options
    )


def make_nccl(store: dist.Store, name: str, rank: int, ranks: Sequence[int], timeout: timedelta) -> Any:
    """Make torch's NCCL (on AMD RCCL) backend among the global ``ranks``, of which this process is number ``rank``.

    ``name``: its name in torch's own messages.
    """
    kind = required("torch.distributed:ProcessGroupNCCL", _OVER_HOSTS)
    options = kind.Options()
    options._timeout = timeout
    options.global_ranks_in_group, options.group_name = list(ranks), f"iris {name}"
    return kind(store, rank, len(ranks), options)


def unified_window() -> Any:
    """A window's attributes for memory that is the peer's own, and no copy of it; None if torch has no windows."""
    if _WindowAttr is None or _WindowAccessType is None:
        return None
    attributes = _WindowAttr()
    attributes.access_type = _WindowAccessType.UNIFIED
    return attributes


def describe(group: dist.ProcessGroup, text: str) -> None:
    """Set the group's description in torch's messages."""
    member(group, "torch.distributed:ProcessGroup._set_group_desc", "split a process group")(text)


def source_of(work: dist.Work) -> int:
    """The group rank of the sender, for a recv() from any rank."""
    return member(work, "torch.distributed:Work._source_rank", "know who has sent a message")()
