"""What a dispatch or a combine has to know of its tensors' dtypes, shapes and devices: found and checked once.

A later call of tensors like these finds its plan in a dictionary. What may differ between the two is looked at in each:
addresses, strides, whether a gradient is wanted, and which memory is in use.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from iris.ccl.checks import check_tensor
from iris.experts.kernels import Kernel
from iris.experts.views import Views

STRIDED = torch.strided
# Of a tensor that is looked at in each call.
UNCOMMON = object()


class Plan(NamedTuple):
    """``tail``: the kernel's last arguments. ``launches``: those that are ready, by the remainders of 16 of what is
    given. ``views``: of the slots in the layout of the call."""

    kernel: Kernel
    tail: tuple
    launches: dict[tuple[int, ...], Callable[..., None]]
    views: list[Views]


def kind_of(tensor: Any) -> Any:
    """What a plan depends on of a tensor, or of None."""
    if tensor is None:
        return None
    if (
        tensor.__class__ is torch.Tensor
        and tensor.layout is STRIDED
        and not (tensor.requires_grad and torch.is_grad_enabled())
    ):
        return tensor.dtype, tensor.shape, tensor.device
    return UNCOMMON


def pointers_of(call: str, tensors: tuple[torch.Tensor, ...]) -> tuple[int, ...]:
    """Where they begin. Raises if one has no memory, as a stand-in of torch.func, whose class says nothing."""
    try:
        pointers = tuple([each.data_ptr() for each in tensors])
    except RuntimeError:
        pointers = ()
    if pointers and all(pointers):
        return pointers
    for each in tensors:
        check_tensor(call, each)
    return tuple([each.data_ptr() for each in tensors])
