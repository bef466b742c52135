"""Fast paths of the tensor operators, ``+`` and the like, for integers and pointers.

Triton compares the types of both operands, converts and broadcasts them, and makes the type of the result. The compiler
does that once for each operation of a kernel. The simulator would do it each time that the operation runs, which takes
several times as long as the operation itself. Most operands are int32 or int64, or one is a number of Python's. For
these numpy's operators give the same result. All else goes to Triton's operator.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl

from iris.compat.interpreter import TensorHandle

# The types for which numpy's operators do what Triton's do, also on one of each; with the numbers that fit into them.
# By id, as not all types have a hash.
_LIMITS = {id(dtype): (dtype.get_int_min_value(), dtype.get_int_max_value()) for dtype in (tl.int32, tl.int64)}


def _divided(left: np.ndarray, right: Any) -> np.ndarray:
    """The quotient, rounded toward zero; numpy rounds down."""
    return (left - np.fmod(left, right)) // right


_ARITHMETIC: dict[str, Callable] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": _divided,
    "mod": np.fmod,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
# These are fast for int1, too.
_BITWISE = ("and", "or", "xor")


@functools.cache
def _broadcast(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of a result from blocks of these shapes; None if that is left to Triton."""
    if len(left) != len(right) or any(a != b and 1 not in (a, b) for a, b in zip(left, right, strict=True)):
        return None
    return tuple(map(max, left, right))


# By the ids of a block's shape and of its elements' type, both of which are made once (`iris.simulator.shapes`).
_blocks: dict[tuple[int, int], tl.block_type] = {}


def _with_elements(block: tl.dtype, dtype: tl.dtype) -> tl.dtype:
    """The type of a block of this shape, or of a number, with elements of ``dtype``."""
    if not block.is_block():
        return dtype
    if type(dtype) is not tl.dtype:  # a pointer type, which is made anew for each argument
        return block.with_element_ty(dtype)
    key = id(block.shape), id(dtype)
    if key not in _blocks:
        _blocks[key] = block.with_element_ty(dtype)
    return _blocks[key]


def _type_of(dtype: tl.dtype, left: tl.tensor, right: tl.tensor) -> tl.dtype | None:
    """The type of a result from these with elements of ``dtype``; None if that is left to Triton."""
    block = left.type if left.shape is right.shape or not right.type.is_block() else right.type
    if block is right.type and left.type.is_block():
        shape = _broadcast(tuple(left.type.shape), tuple(right.type.shape))
        return None if shape is None else tl.block_type(dtype, list(shape))
    return block if block.scalar is dtype else _with_elements(block, dtype)


def _replace(name: str, compute: Callable) -> None:
    """Replace the operator ``__name__`` of tensors by one that calls ``compute`` on numpy arrays where it can."""
    otherwise, compares = getattr(tl.tensor, f"__{name}__"), name in _COMPARISONS
    same = {id(tl.int1)} if name in _BITWISE else set()

    @functools.wraps(otherwise)
    def calculated(self: tl.tensor, other: Any) -> Any:
        given, dtype, result = other, self.dtype, None
        if type(other) is tl.constexpr:
            other = other.value
        if type(other) is tl.tensor:
            if id(dtype) in _LIMITS and id(other.dtype) in _LIMITS:
                # An int32 and an int64 give an int64, as in numpy.
                dtype = dtype if dtype is other.dtype else tl.int64
                result = _type_of(dtype, self, other)
            elif dtype is other.dtype and id(dtype) in same:
                result = _type_of(dtype, self, other)
            other = other.handle.data
        elif type(other) is int and id(dtype) in _LIMITS:
            least, most = _LIMITS[id(dtype)]
            result = self.type if least <= other <= most else None
        if result is None:
            return otherwise(self, given)
        values = compute(self.handle.data, other)
        if compares:
            dtype, result = tl.int1, _with_elements(result, tl.int1)
        return tl.tensor(TensorHandle(values, dtype), result)

    setattr(tl.tensor, f"__{name}__", calculated)


def _add_offsets() -> None:
    """Replace ``pointer + offset``, unless it points to pointers."""
    otherwise, (least, most) = tl.tensor.__add__, _LIMITS[id(tl.int32)]

    @functools.wraps(otherwise)
    def moved(self: tl.tensor, other: Any) -> Any:
        dtype = self.dtype
        if type(dtype) is not tl.pointer_type or type(dtype.element_ty) is not tl.dtype:
            return otherwise(self, other)
        size, result = max(1, dtype.element_ty.primitive_bitwidth // 8), None
        offset = other.value if type(other) is tl.constexpr else other
        if type(offset) is tl.tensor and id(offset.dtype) in _LIMITS:
            result, moves = _type_of(dtype, self, offset), size * offset.handle.data.astype(np.uint64)
        elif type(offset) is int and least <= offset <= most:
            result, moves = self.type, np.uint64(size * offset % (1 << 64))
        if result is None:
            return otherwise(self, other)
        return tl.tensor(TensorHandle(self.handle.data + moves, dtype), result)

    tl.tensor.__add__ = moved


def install() -> None:
    """Once for the life of the process, after `iris.simulator.language` has bound the language."""
    for name, compute in _ARITHMETIC.items():
        _replace(name, compute)
    for name in _COMPARISONS:
        _replace(name, getattr(operator, name))
    _add_offsets()
