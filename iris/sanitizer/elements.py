"""Which element of a tensor a byte of its memory belongs to, by the text that names the tensor: ``int32[4, 8]``.

The tensors of the heap are contiguous. For another tensor that is not, the text describes its storage.
"""

import math
import re

import torch

_TENSOR = re.compile(r"(\w+)\[([\d, ]*)\]")


def element(tensor: str, byte: int) -> str:
    """``, element [1, 5]``; nothing if the tensor has no dimensions, or if the text names no tensor."""
    parts = _parts(tensor)
    if parts is None or not parts[1]:
        return ""
    size, shape = parts
    number, index = byte // size, []
    for extent in reversed(shape):
        number, within = divmod(number, extent)
        index.append(within)
    return f", element {index[::-1]}"


def number_of(tensor: str, distance: int) -> str:
    """``3 elements``: so many bytes as elements of the tensor, or as bytes if they are not whole elements."""
    size, _ = _parts(tensor) or (1, ())
    number, rest = divmod(distance, size)
    unit = "byte" if rest or _parts(tensor) is None else "element"
    number = distance if rest else number
    return f"{number} {unit}{'s' * (number != 1)}"


def _parts(tensor: str) -> tuple[int, list[int]] | None:
    """The bytes of an element, and the shape; None if the text names no tensor."""
    found = _TENSOR.match(tensor)
    if found is None:
        return None
    dtype = getattr(torch, found[1], None)
    if not isinstance(dtype, torch.dtype):
        return None
    shape = [int(extent) for extent in found[2].split(",") if extent]
    return (dtype.itemsize, shape) if math.prod(shape) else None
