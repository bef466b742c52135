"""Tensors that stand for others and have no memory that a kernel could be given: what they are, and what to do."""

import torch

from iris.compat.subclasses import in_transform, is_fake, is_transformed, is_wrapper

OPERATORS = "iris.ccl.functional, iris.ops.functional and iris.experts.functional"


def stand_in(tensor: torch.Tensor) -> str | None:
    """What the tensor is if no kernel can be given it, and what to do: the end of a sentence. None if it can."""
    is_plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided and not in_transform()
    if is_plain and has_memory(tensor):
        return None
    kind = type(tensor).__name__
    if is_fake(tensor):
        return (
            f"a tensor without memory ({kind} on {tensor.device}), as torch has where it traces. Make the call an "
            f"operator (torch.library.custom_op), or use those of {OPERATORS}."
        )
    if kind == "AsyncCollectiveTensor":
        return (
            "the result of a functional collective that nobody has waited for (AsyncCollectiveTensor). Wait for it: "
            "x = torch.distributed._functional_collectives.wait_tensor(x)."
        )
    if kind == "DTensor":
        return "a DTensor, which has no memory of its own. Pass this rank's part of it, x.to_local()."
    if is_wrapper(tensor):
        return f"a {kind}, which has no memory of its own. Pass the tensors that it wraps."
    if is_transformed(tensor):
        return (
            "a tensor inside a transform of torch.func (vmap, grad, functionalize, ...), without memory of its own. "
            f"Make the call outside of the transform, or as an operator: torch.library.custom_op, or {OPERATORS}."
        )
    if tensor.layout != torch.strided:
        return f"a tensor of the layout {tensor.layout}. Pass x.to_dense()."
    if tensor.device.type == "meta" or has_memory(tensor):
        return None
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"a {kind}, which has no memory of its own. Pass the tensors that it wraps."
    return (
        "a tensor without memory: its storage was given back, as x.untyped_storage().resize_(0) does, or torch made it "
        "for a purpose of its own. Pass one that has memory."
    )


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether there is memory of its own for the elements, if there are any."""
    try:
        return tensor.data_ptr() != 0 or tensor.numel() == 0
    except (RuntimeError, ValueError):  # which torch raises for some that have none
        return False
