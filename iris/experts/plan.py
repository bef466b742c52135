"""What a dispatch or a combine has to know of its tensors' dtypes, shapes and devices: found and checked once.

A later call of tensors like these finds its plan in a dictionary. What may differ between the two is looked at in each:
addresses, strides, whether a gradient is wanted, and which memory is in use.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from iris.ccl.checks import check_tensor
from iris.experts.combine import combine
from iris.experts.dispatch import dispatch
from iris.experts.kernel_arguments import Scales
from iris.experts.views import Views

# What rows of fp8 are moved as, where their values do not matter.
BYTES = torch.uint8
STRIDED = torch.strided
# Of a tensor that is looked at in each call.
UNCOMMON = object()


class Kernel(NamedTuple):
    """``arguments``: of the slot's memory (`Views.tensors` or `Views.launched`), of what the caller gives, and of what
    a plan has."""

    name: str
    function: Any
    arguments: Callable[[tuple, tuple, tuple], tuple]


class Plan(NamedTuple):
    """``tail``: the kernel's last arguments. ``launches``: those that are ready, by the remainders of 16 of what is
    given. ``views``: of the slots in the layout of the call."""

    kernel: Kernel
    tail: tuple
    launches: dict[tuple[int, ...], Callable[..., None]]
    views: list[Views]


def _dispatch_arguments(memory: tuple, given: tuple, tail: tuple) -> tuple:
    slot, layout, scales = memory
    x, topk_ids, topk_weights, *factors = given
    if factors:
        scales = Scales(*factors, *scales[1:])
        x = x.view(BYTES) if isinstance(x, torch.Tensor) else x
    return slot, x, scales, topk_ids, topk_weights, layout, *tail


def _combine_arguments(memory: tuple, given: tuple, tail: tuple) -> tuple:
    slot, (_, _, _, places), _ = memory
    y, topk_weights, out = given
    return slot, y, topk_weights, places, out, *tail


DISPATCH = Kernel("dispatch", dispatch, _dispatch_arguments)
COMBINE = Kernel("combine", combine, _combine_arguments)


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
