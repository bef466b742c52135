"""Operators of tensors, where nothing is to be converted.

The language looks at the types of both operands, converts and broadcasts them, and makes the type of the result. The
compiler does so once for each operation of a kernel; the simulator would each time it carries one out, which takes
several times as long as the operation itself. Most operands have the same type, or one is a number of Python's.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

# The types of which numpy's operations are the language's, by id as some types have no hash, and which of Python's
# numbers fit into them.
_LIMITS = {id(dtype): (dtype.get_int_min_value(), dtype.get_int_max_value()) for dtype in (tl.int32, tl.int64)}


def _divided(left: np.ndarray, right: Any) -> np.ndarray:
    """The quotient, rounded toward zero; numpy rounds down."""
    return (left - np.fmod(left, right)) // right


_ARITHMETIC = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": _divided, "mod": np.fmod,
    "and": operator.and_, "or": operator.or_, "xor": operator.xor,
}  # fmt: skip
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
# Also of truth values.
_BITWISE = ("and", "or", "xor")


@functools.cache
def _broadcast(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of what is calculated from blocks of these; None if the language has to say."""
    if len(left) != len(right) or any(a != b and 1 not in (a, b) for a, b in zip(left, right, strict=True)):
        return None
    return tuple(map(max, left, right))


def _type_of(left: tl.tensor, right: tl.tensor) -> tl.dtype | None:
    """The type of what is calculated from these: of the elements of ``left``. None if the language has to say."""
    if left.shape is right.shape or not right.type.is_block():  # shapes are made once: `iris.simulator.shapes`
        return left.type
    shape = tuple(right.type.shape)
    if left.type.is_block():
        shape = _broadcast(tuple(left.type.shape), shape)
    return None if shape is None else tl.block_type(left.dtype, list(shape))


def _replace(name: str, compute: Callable) -> None:
    otherwise, compares = getattr(tl.tensor, f"__{name}__"), name in _COMPARISONS
    types = {*_LIMITS, id(tl.int1)} if name in _BITWISE else {*_LIMITS}

    @functools.wraps(otherwise)
    def calculated(self: tl.tensor, other: Any) -> Any:
        given, dtype = other, self.dtype
        if type(other) is tl.constexpr:
            other = other.value
        if type(other) is tl.tensor:
            result = _type_of(self, other) if other.dtype is dtype and id(dtype) in types else None
            other = other.handle.data
        elif type(other) is int and id(dtype) in _LIMITS:
            least, most = _LIMITS[id(dtype)]
            result = self.type if least <= other <= most else None
        else:
            result = None
        if result is None:
            return otherwise(self, given)
        values = compute(self.handle.data, other)
        if compares:
            dtype, result = tl.int1, result.with_element_ty(tl.int1) if result.is_block() else tl.int1
        return tl.tensor(TensorHandle(values, dtype), result)

    setattr(tl.tensor, f"__{name}__", calculated)


def _add_offsets() -> None:
    """To pointers."""
    otherwise = tl.tensor.__add__

    @functools.wraps(otherwise)
    def moved(self: tl.tensor, other: Any) -> Any:
        dtype = self.dtype
        if type(dtype) is not tl.pointer_type or type(other) is not tl.tensor or id(other.dtype) not in _LIMITS:
            return otherwise(self, other)
        result = _type_of(self, other) if type(dtype.element_ty) is tl.dtype else None
        if result is None:
            return otherwise(self, other)
        size = max(1, dtype.element_ty.primitive_bitwidth // 8)
        return tl.tensor(TensorHandle(self.handle.data + size * other.handle.data.astype(np.uint64), dtype), result)

    tl.tensor.__add__ = moved


def install() -> None:
    """For the life of the process, once the language is the simulator's."""
    for name, compute in _ARITHMETIC.items():
        _replace(name, compute)
    for name in _COMPARISONS:
        _replace(name, getattr(operator, name))
    _add_offsets()
