"""What wrappers ask of the tensors that they are given, before they launch anything."""

import torch

import iris


def check_dtype(dtype: torch.dtype) -> None:
    """Raise `ValueError` unless it is one whose products kernels here add up, which they do in float32."""
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"The kernel multiplies float16, bfloat16 or float32, and was given {dtype}.")


def check_tensors(device: torch.device, **expected: tuple) -> None:
    """Raise `ValueError` unless all are on ``device``, and what they should be: ``name=(tensor, dtype, *shape)``."""
    for name, (tensor, dtype, *shape) in expected.items():
        if (tensor.device, tensor.dtype, list(tensor.shape)) != (device, dtype, shape):
            given = f"{list(tensor.shape)} of {tensor.dtype} on {tensor.device}"
            raise ValueError(f"{name} is {given}. Give {shape} of {dtype} on {device}.")


def check_contiguous(device: torch.device, **expected: tuple) -> None:
    """The same for a kernel that takes no strides: its tensors are contiguous too."""
    check_tensors(device, **expected)
    for name, (tensor, _, *shape) in expected.items():
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name}, {shape}, has strides of {list(tensor.stride())}, and the kernel takes none. "
                "Give a contiguous tensor."
            )


def check_symmetric(ctx: iris.Iris, **tensors: torch.Tensor) -> None:
    """Raise `ValueError` unless all are on the heap: a kernel would take other memory for a peer's copy."""
    for name, tensor in tensors.items():
        if not ctx.is_symmetric(tensor):
            raise ValueError(f"{name} is not on the symmetric heap, where peers reach it. Make it with ctx.empty().")
