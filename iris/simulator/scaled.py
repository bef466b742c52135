"""Products of matrices with block scale factors (OCP Microscaling Formats, MX, 1.0; NVFP4).

In MX, 32 numbers along K share a factor, which is a power of two (E8M0). In NVFP4, 16 numbers share one, which is FP8.
Numbers of 4 bits (E2M1) come two to a byte, the first in its low half. A number times its factor is exact in float32.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.experimental.gluon import language as gl

from iris.compat.interpreter import TensorHandle
from iris.simulator import dtypes
from iris.simulator.reductions import make_tensor
from iris.simulator.semantic import integer, semantic, truth
from iris.simulator.shapes import unwrapped

# The values of E2M1 by their bits.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)
FORMATS = {"e4m3": tl.float8e4nv, "e5m2": tl.float8e5, "bf16": tl.bfloat16, "fp16": tl.float16}


def dot_scaled(
    lhs: tl.tensor,
    lhs_scale: Any,
    lhs_format: Any,
    rhs: tl.tensor,
    rhs_scale: Any,
    rhs_format: Any,
    acc: Any = None,
    fast_math: Any = False,
    lhs_k_pack: Any = True,
    rhs_k_pack: Any = True,
    out_dtype: Any = tl.float32,
) -> tl.tensor:
    """``lhs @ rhs + acc``. Factors of ``lhs`` [M, K] are [M, K / 32], of ``rhs`` [K, N] they are [N, K / 32]."""
    left = _numbers(lhs, lhs_format, -1 if truth(lhs_k_pack) else -2)
    right = _numbers(rhs, rhs_format, -2 if truth(rhs_k_pack) else -1)
    product = np.matmul(_times(left, lhs_scale), _times(right.swapaxes(-1, -2), rhs_scale).swapaxes(-1, -2))
    acc = unwrapped(acc)
    return _rounded(product if acc is None else product + acc.handle.data, out_dtype)


def mfma_scaled(
    a: tl.tensor,
    a_scale: Any,
    a_format: Any,
    b: tl.tensor,
    b_scale: Any,
    b_format: Any,
    acc: tl.tensor,
    *_: Any,
    **__: Any,
) -> tl.tensor:
    return dot_scaled(a, a_scale, a_format, b, b_scale, b_format, acc)


def fp4_to_fp(src: tl.tensor, elem_type: Any, axis: Any) -> tl.tensor:
    return _rounded(_numbers(src, "e2m1", integer(axis)), elem_type)


def scaled_upcast(src: tl.tensor, scale: tl.tensor, elem_type: Any, axis: Any = None) -> tl.tensor:
    if src.dtype.is_floating():
        return _rounded(_times(dtypes.widen(src.handle), scale), elem_type)
    return _rounded(_times(_numbers(src, "e2m1", integer(axis)), scale, integer(axis)), elem_type)


def _rounded(values: np.ndarray, kind: Any) -> tl.tensor:
    return semantic.cast(make_tensor(values.astype(np.float32, copy=False), tl.float32), unwrapped(kind))


def _numbers(values: tl.tensor, name: Any, axis: int) -> np.ndarray:
    """Numbers of the format ``name``, in float32. ``axis``: along which the two numbers of a byte lie."""
    data = values.handle.data
    if unwrapped(name) == "e2m1":
        twice = np.moveaxis(np.repeat(data.view(np.uint8), 2, axis), axis, -1)
        halves = twice >> np.arange(twice.shape[-1], dtype=np.uint8) % 2 * 4 & 15
        return np.moveaxis(E2M1[halves], -1, axis)
    kind = FORMATS[unwrapped(name)]
    # They may come as integers of the same size.
    return dtypes.widen(TensorHandle(data.view(dtypes.storage(kind)), kind)).astype(np.float32)


def _times(numbers: np.ndarray, scale: Any, axis: int = -1) -> np.ndarray:
    """``numbers`` times their scale factors, which lie along ``axis``; or times one factor for all, or none."""
    scale = unwrapped(scale)
    if scale is None:
        return numbers
    if not isinstance(scale, tl.tensor):
        return numbers * (np.ldexp(np.float32(1), scale - 127) if isinstance(scale, int) else np.float32(scale))
    if scale.dtype.is_floating():
        factors = dtypes.widen(scale.handle)
    else:
        exponents = scale.handle.data.view(np.uint8)
        factors = np.where(exponents == 255, np.nan, np.ldexp(np.float32(1), exponents.astype(np.int32) - 127))
    if factors.size > 1:
        factors = np.repeat(factors, numbers.shape[axis] // factors.shape[axis], axis)
    return numbers * factors.astype(np.float32)


def replacements() -> dict[Any, Callable]:
    """What stands in for which builtin."""
    replaced: dict[Any, Callable] = {tl.dot_scaled: dot_scaled, gl.fp4_to_fp: fp4_to_fp}
    for module in (gl.amd.cdna3, gl.amd.cdna4):
        for function in (mfma_scaled, scaled_upcast):
            if hasattr(module, function.__name__):
                replaced[getattr(module, function.__name__)] = function
    return replaced
