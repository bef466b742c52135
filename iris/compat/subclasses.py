"""Recognises tensors without memory of their own: fake tensors, wrapper subclasses, and those of torch.func.

All of these parts are there in torch 2.9 to 2.13. Where one is gone, importing `iris` raises `MissingPartError`, as a
kernel would be given addresses that mean nothing.
"""

import torch

from iris.compat.parts import required

_WHY = "tell tensors without memory from others"
_FakeTensor = required("torch._subclasses.fake_tensor:FakeTensor", _WHY)
_is_traceable_wrapper_subclass = required("torch.utils._python_dispatch:is_traceable_wrapper_subclass", _WHY)
_is_functorch_wrapped_tensor = required("torch._C._functorch:is_functorch_wrapped_tensor", _WHY)
_peek_interpreter_stack = required("torch._C._functorch:peek_interpreter_stack", _WHY)


def in_transform() -> bool:
    """Whether a transform of torch.func runs in this thread. Then tensors that look plain may have no memory."""
    return _peek_interpreter_stack() is not None


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether it is a fake tensor, with which torch traces: it has a shape and no elements."""
    return isinstance(tensor, _FakeTensor)


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether it is of a subclass that wraps other tensors, and that torch.compile can unwrap."""
    return _is_traceable_wrapper_subclass(tensor)


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a transform of torch.func (vmap, grad, functionalize, ...) has wrapped it."""
    return _is_functorch_wrapped_tensor(tensor)
