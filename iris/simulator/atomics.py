"""Atomic operations on memory that several processes share.

Triton's interpreter has real ``std::atomic`` operations on 32 and 64 bits, and a real compare-and-swap on 16 bits. What
it lacks is made from these: an exchange of floats exchanges their bits, and every operation on 16 bits is a loop around
compare-and-swap. (Its own addition of fp16 takes a mutex, which other processes do not share.)
"""

from collections.abc import Callable

import numpy as np
import triton.language as tl

from iris.compat.interpreter import TensorHandle, native_operations, native_orders
from iris.compat.libtriton import ATOMIC_OP as OP
from iris.compat.libtriton import MEM_SEMANTIC, MEM_SYNC_SCOPE, atomic_cas, atomic_rmw, load
from iris.simulator import dtypes

_COMBINE: dict[OP, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    OP.ADD: np.add,
    OP.FADD: np.add,
    OP.MIN: np.minimum,
    OP.UMIN: np.minimum,
    OP.MAX: np.maximum,
    OP.UMAX: np.maximum,
    OP.AND: np.bitwise_and,
    OP.OR: np.bitwise_or,
    OP.XOR: np.bitwise_xor,
    OP.XCHG: lambda _, new: new,
}

# As they are called in the language, for messages.
NAMES = {
    OP.ADD: "atomic_add",
    OP.FADD: "atomic_add",
    OP.MIN: "atomic_min",
    OP.UMIN: "atomic_min",
    OP.MAX: "atomic_max",
    OP.UMAX: "atomic_max",
    OP.AND: "atomic_and",
    OP.OR: "atomic_or",
    OP.XOR: "atomic_xor",
    OP.XCHG: "atomic_xchg",
}

ORDERS = {
    MEM_SEMANTIC.RELAXED: "relaxed",
    MEM_SEMANTIC.ACQUIRE: "acquire",
    MEM_SEMANTIC.RELEASE: "release",
    MEM_SEMANTIC.ACQUIRE_RELEASE: "acq_rel",
}
SCOPES = {MEM_SYNC_SCOPE.CTA: "cta", MEM_SYNC_SCOPE.GPU: "gpu", MEM_SYNC_SCOPE.SYSTEM: "sys"}


def of(name: str, dtype: tl.dtype) -> OP:
    """The operation "ADD", "MIN", "MAX", "AND", "OR" or "XOR" on elements of ``dtype``."""
    if dtype.is_floating() and name == "ADD":
        return OP.FADD
    return getattr(OP, f"U{name}" if dtype.is_int_unsigned() and name in ("MIN", "MAX") else name)


def apply(op: OP, old: np.ndarray, operand: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """What memory holds after ``op``, from what it held before; arrays in the storage type of ``dtype``."""
    if op == OP.XCHG or not dtypes.is_narrow(dtype):
        return _COMBINE[op](old, operand)
    wide_old, wide_operand = (dtypes.widen(TensorHandle(data, dtype)) for data in (old, operand))
    return dtypes.narrow(_COMBINE[op](wide_old, wide_operand), dtype)


def compare_and_swap(pointers: np.ndarray, expected: np.ndarray, new: np.ndarray, sem: MEM_SEMANTIC) -> np.ndarray:
    """Swap lane by lane where memory holds the bits of ``expected``; returns the old values."""
    bits = f"u{expected.itemsize}"
    old = atomic_cas(pointers, _bits(expected, bits), _bits(new, bits), native_orders[sem])
    return old.view(expected.dtype)


def swapped(expected: np.ndarray, new: np.ndarray, old: np.ndarray) -> bool:
    """Whether a compare-and-swap that returned ``old`` changed memory in any lane."""
    expected, new, old = (_bits(values, f"u{old.itemsize}") for values in (expected, new, old))
    return bool(np.any((old == expected) & (new != old)))


def read_modify_write(
    op: OP, pointers: np.ndarray, operand: np.ndarray, dtype: tl.dtype, sem: MEM_SEMANTIC
) -> np.ndarray:
    """Apply ``op`` lane by lane, in order; lanes may name the same address. Returns the old values."""
    if operand.itemsize == 2:
        return _loop(op, pointers, operand, dtype, sem)
    if op == OP.XCHG:
        operand, result_type = _bits(operand, f"i{operand.itemsize}"), operand.dtype
    else:
        operand, result_type = np.ascontiguousarray(operand), operand.dtype
    every = np.ones(pointers.shape, dtype=bool)
    return atomic_rmw(native_operations[op], pointers, operand, every, native_orders[sem]).view(result_type)


def _loop(op: OP, pointers: np.ndarray, operand: np.ndarray, dtype: tl.dtype, sem: MEM_SEMANTIC) -> np.ndarray:
    result = np.empty_like(operand)
    lanes = np.arange(pointers.size)
    guess = load(pointers, np.ones(pointers.shape, bool), np.zeros_like(operand), operand.dtype)
    while lanes.size:
        found = compare_and_swap(pointers[lanes], guess, apply(op, guess, operand[lanes], dtype), sem)
        # Compared as bits: a NaN in memory must be recognised, and -0 is not 0.
        failed = found.view(np.uint16) != guess.view(np.uint16)
        result[lanes[~failed]] = found[~failed]
        lanes, guess = lanes[failed], found[failed]
    return result


def _bits(values: np.ndarray, kind: str) -> np.ndarray:
    return np.ascontiguousarray(values).view(kind)
