"""The floating-point types that numpy lacks, called *narrow* here: how they are stored, widened and rounded.

The interpreter holds bf16 and the 8-bit formats as the bits that memory has (uint16, uint8). Arithmetic is done in
float32, and every result is rounded to nearest even, as a GPU's conversion instructions do. torch has all these
formats, so it does the conversions.
"""

import numpy as np
import torch
import triton.language as tl

from iris.compat.interpreter import TensorHandle, numpy_dtype

# By the name of Triton's type, because pointer types cannot be hashed.
_TORCH = {
    tl.bfloat16.name: torch.bfloat16,
    tl.float8e4nv.name: torch.float8_e4m3fn,
    tl.float8e5.name: torch.float8_e5m2,
    tl.float8e4b8.name: torch.float8_e4m3fnuz,
    tl.float8e5b16.name: torch.float8_e5m2fnuz,
}
_NUMPY: dict[str, np.dtype] = {}


def is_narrow(dtype: tl.dtype) -> bool:
    """Whether values of this scalar type are stored as bits that numpy cannot calculate with."""
    return dtype.name in _TORCH


def storage(dtype: tl.dtype) -> np.dtype:
    """The numpy type that a tensor of ``dtype`` is stored in."""
    scalar = dtype.scalar
    if scalar.name not in _NUMPY:
        _NUMPY[scalar.name] = numpy_dtype(scalar)
    return _NUMPY[scalar.name]


def poison(dtype: tl.dtype) -> np.generic:
    """The value of memory that holds none yet: NaN if the type has one, else an unlikely integer."""
    scalar = dtype.scalar
    stored = storage(scalar)
    if stored == np.bool_:
        return np.True_
    # All bits set is a NaN, but not in the "fnuz" formats, whose one NaN is where others have -0.
    byte = 0xFF if scalar.is_floating() and scalar.name not in (tl.float8e4b8.name, tl.float8e5b16.name) else 0x80
    return np.frombuffer(bytes([byte]) * stored.itemsize, dtype=stored)[0]


def widen(handle: TensorHandle) -> np.ndarray:
    """The values of ``handle`` in a type that numpy calculates with: float32 for narrow types, else as they are."""
    target = _TORCH.get(handle.dtype.scalar.name)
    if target is None:
        return handle.data
    bits = torch.from_numpy(np.array(handle.data, order="C"))  # a copy: torch wants writable, contiguous memory
    return bits.view(target).to(torch.float32).numpy()


def narrow(values: np.ndarray, dtype: tl.dtype, toward_zero: bool = False) -> np.ndarray:
    """Round ``values`` to the scalar type ``dtype``; the result is in its storage type.

    8-bit formats saturate, as NVIDIA's cvt.satfinite does (PTX ISA, cvt): what is too large becomes the largest finite
    value, a NaN stays one.
    """
    target = _TORCH.get(dtype.name)
    if target is None:
        rounded = np.asarray(values).astype(storage(dtype))
        return _step_toward_zero(rounded, rounded, values) if toward_zero else rounded
    values = np.array(values, dtype=np.float32, order="C")
    exact = values
    if target.itemsize == 1:
        limit = torch.finfo(target).max
        # Rounding toward zero keeps infinity: it only cuts off the lower bits of a float16.
        values = np.where(toward_zero & np.isinf(values), values, np.clip(values, -limit, limit))
    nearest = torch.from_numpy(values).to(target)
    bits = nearest.view(torch.uint16 if target.itemsize == 2 else torch.uint8).numpy()
    return _step_toward_zero(bits, nearest.to(torch.float32).numpy(), exact) if toward_zero else bits


def to_integer(values: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """Floating-point ``values`` as the integer type ``dtype``, rounded toward zero.

    A value out of range becomes the nearest number of the type. NaN becomes 0; but if either type has 64 bits, the
    number of which only the highest bit is set (PTX ISA, "cvt"; H100 does so). To 8 bits: the lower ones of 16.
    """
    stored = storage(dtype)
    wide = np.dtype(f"{stored.kind}{max(2, stored.itemsize)}")
    info, whole = np.iinfo(wide), np.trunc(values.astype(np.float64))
    # Compared with a power of two: float64 may not have the largest number itself.
    below, above, nothing = whole < info.min, whole >= 2.0 ** (info.max.bit_length()), np.isnan(whole)
    result = np.where(below | above | nothing, 0, whole).astype(wide)
    result[below], result[above] = info.min, info.max
    if max(values.itemsize, wide.itemsize) == 8:
        result[nothing] = np.array([1 << (8 * wide.itemsize - 1)], f"u{wide.itemsize}").view(wide)
    return result.astype(stored)


def _step_toward_zero(stored: np.ndarray, rounded: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Take one step back where rounding to nearest went away from zero. (The formats are sign and magnitude.)"""
    bits = stored.view(f"u{stored.itemsize}")
    return (bits - (np.abs(rounded) > np.abs(exact))).astype(bits.dtype).view(stored.dtype)
