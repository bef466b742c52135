"""What the public functions of torch.distributed do not tell of process groups, and what they cannot set.

All of these are there in torch 2.9 to 2.13. Where one is gone, its call raises `MissingPartError`, but for those that
only the sanitizer asks: without `torch._C.Future` it sees futures that Python made and none that C++ made, and a call
that it cannot tell to be from torch's own Python counts as one that the program waits for at once.
Windows, and what they say of memory, are new in torch 2.14.
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
"""The class whose methods all futures have, those of C++ included."""

_SOURCE = optional("torch.distributed.distributed_c10d:__file__")
# From torch 2.14 on.
_WindowAttr = optional("torch._C._distributed_c10d:WindowAttr")
_WindowAccessType = optional("torch._C._distributed_c10d:WindowAccessType")
_SPLIT_GROUP = inspect.unwrap(dist.split_group).__code__


def is_of_torch_distributed(code: CodeType) -> bool:
    """Whether this is code of torch.distributed's Python functions, which programs call."""
    return code.co_filename == _SOURCE


def is_split_group(code: CodeType) -> bool:
    """Whether this is the code of `torch.distributed.split_group`, below its decorators."""
    return code is _SPLIT_GROUP


def goes_on_by_itself(given: Mapping[str, Any]) -> bool:
    """Whether a collective's operation leaves it to the caller to wait for it; ``given``: its arguments by name.

    The argument is ``asyncOp`` in torch 2.11, and ``async_op`` in 2.13. Where it is not given, the caller waits.
    """
    return given.get("async_op", given.get("asyncOp")) is not False


def existing_groups() -> Any:
    """The process groups that have not been destroyed, as the keys of a mapping."""
    return required("torch.distributed.distributed_c10d:_world.pg_map", "notice that a process group was destroyed")


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """What carries out a group's calls with tensors on this device."""
    return member(group, "torch.distributed:ProcessGroup._get_backend", "find a process group's backend")(device)


def set_backend(group: dist.ProcessGroup, device: torch.device, kind: Any, backend: Any) -> None:
    """Let ``backend``, of this kind, carry out the group's calls, with tensors on this device and without any."""
    member(group, "torch.distributed:ProcessGroup._register_backend", _BESIDE)(device, kind, backend)
    member(group, "torch.distributed:ProcessGroup._set_default_backend", _BESIDE)(kind)


def all_gather(backend: Any, output: torch.Tensor, input: torch.Tensor) -> Any:
    """Begin to gather every rank's ``input`` into one tensor, by what moves data for a group. Returns its work."""
    gather = member(backend, "torch._C._distributed_c10d:Backend._allgather_base", _OVER_HOSTS)
    return gather(output, input)


def reduce_scatter(backend: Any, output: torch.Tensor, input: torch.Tensor, options: Any) -> Any:
    """Begin to combine every rank's ``input``, of which each gets a part. Returns its work."""
    return member(backend, "torch._C._distributed_c10d:Backend._reduce_scatter_base", _OVER_HOSTS)(
        output, input, options
    )


def make_nccl(store: dist.Store, name: str, rank: int, ranks: Sequence[int], timeout: timedelta) -> Any:
    """NCCL (RCCL on AMD) among ``ranks``, of which this process is number ``rank``, as torch makes it for groups.

    ``name``: what torch's own reports call it.
    """
    kind = required("torch.distributed:ProcessGroupNCCL", _OVER_HOSTS)
    options = kind.Options()
    options._timeout = timeout
    options.global_ranks_in_group, options.group_name = list(ranks), f"iris {name}"
    return kind(store, rank, len(ranks), options)


def unified_window() -> Any:
    """What a window says of memory that is the peer's own, and no copy of it; None where torch has no windows."""
    if _WindowAttr is None or _WindowAccessType is None:
        return None
    attributes = _WindowAttr()
    attributes.access_type = _WindowAccessType.UNIFIED
    return attributes


def describe(group: dist.ProcessGroup, text: str) -> None:
    """Set what torch's messages say of the group."""
    member(group, "torch.distributed:ProcessGroup._set_group_desc", "split a process group")(text)


def source_of(work: dist.Work) -> int:
    """The rank in its group from which a message has come that was received from any."""
    return member(work, "torch.distributed:Work._source_rank", "know who has sent a message")()
