"""`tl.reduce` and `tl.associative_scan`, by calls of the combining function on whole blocks.

Triton's interpreter combines one element at a time, and calculates on stored bits where numpy lacks the type. Here a
reduction combines neighbours, so that each call halves the axis. A scan combines elements at a distance that doubles.
Either takes log2(n) calls, keeps the order of the elements, and rounds after each operation as a GPU does.
"""

from typing import Any

import numpy as np
import triton.language as tl

from iris.compat.interpreter import TensorHandle
from iris.compat.semantic import combine_max, combine_min, combine_product, combine_sum
from iris.simulator import dtypes
from iris.simulator.legality import check_arithmetic
from iris.simulator.shapes import unwrapped

# Combining functions of Triton's own for which numpy has a function.
_FAST_REDUCTIONS = {
    combine_sum.fn: np.add,
    combine_max.fn: np.fmax,
    combine_min.fn: np.fmin,
}
_FAST_SCANS = {combine_sum.fn: np.add, combine_product.fn: np.multiply}


def make_tensor(data: np.ndarray, dtype: tl.dtype) -> tl.tensor:
    """A tensor of the language from stored values; a scalar if ``data`` has no axis."""
    if data.ndim == 0:
        return tl.tensor(TensorHandle(data.reshape(1), dtype), dtype)
    return tl.tensor(TensorHandle(data, dtype), tl.block_type(dtype, list(data.shape)))


def reduce(input: Any, axis: Any, combine_fn: Any, keep_dims: Any = False, **_: Any) -> Any:  # noqa: A002 (Triton's name for it)
    operands, axis = _operands(input), unwrapped(axis)
    shape = operands[0].handle.data.shape
    if axis is None:
        arrays = [operand.handle.data.reshape(-1) for operand in operands]
        kept = (1,) * len(shape)
    else:
        arrays = [np.moveaxis(operand.handle.data, axis, 0) for operand in operands]
        kept = tuple(1 if i == axis % len(shape) else n for i, n in enumerate(shape))
    types = [operand.dtype for operand in operands]
    ufunc = _fast(_FAST_REDUCTIONS, combine_fn, types)
    # numpy adds up float16 in float32. A GPU rounds each addition.
    if ufunc is not None and not (ufunc is np.add and types[0] == tl.float16):
        arrays = [ufunc.reduce(arrays[0], axis=0, dtype=arrays[0].dtype)]
    else:
        while len(arrays[0]) > 1:
            odd = [array[-1:] for array in arrays] if len(arrays[0]) % 2 else None
            pairs = len(arrays[0]) // 2 * 2
            left, right = [a[:pairs:2] for a in arrays], [a[1:pairs:2] for a in arrays]
            arrays = _combine(combine_fn, left, right, types)
            if odd is not None:
                arrays = [np.concatenate(both) for both in zip(arrays, odd, strict=True)]
        arrays = [array[0] for array in arrays]
    if unwrapped(keep_dims):
        arrays = [np.reshape(array, kept) for array in arrays]
    return _results(input, [make_tensor(np.asarray(a), t) for a, t in zip(arrays, types, strict=True)])


def associative_scan(input: Any, axis: Any, combine_fn: Any, reverse: Any = False, **_: Any) -> Any:  # noqa: A002
    operands, axis = _operands(input), unwrapped(axis)
    reverse = unwrapped(reverse)
    step = -1 if reverse else 1
    arrays = [np.moveaxis(operand.handle.data, axis, 0)[::step] for operand in operands]
    types = [operand.dtype for operand in operands]
    for dtype in types:
        check_arithmetic(dtype)
    ufunc = _fast(_FAST_SCANS, combine_fn, types)
    if ufunc is not None:
        arrays = [ufunc.accumulate(arrays[0], axis=0, dtype=arrays[0].dtype)]
    else:
        distance = 1
        while distance < len(arrays[0]):
            earlier = [np.roll(array, distance, axis=0) for array in arrays]
            combined = _combine(combine_fn, earlier, arrays, types)
            arrays = [np.concatenate([a[:distance], c[distance:]]) for a, c in zip(arrays, combined, strict=True)]
            distance *= 2
    arrays = [np.ascontiguousarray(np.moveaxis(array[::step], 0, axis)) for array in arrays]
    return _results(input, [make_tensor(a, t) for a, t in zip(arrays, types, strict=True)])


def _operands(given: Any) -> list[tl.tensor]:
    return [given] if isinstance(given, tl.tensor) else list(given)


def _results(given: Any, results: list[tl.tensor]) -> Any:
    return results[0] if isinstance(given, tl.tensor) else tuple(results)


def _fast(table: dict, combine_fn: Any, types: list[tl.dtype]) -> np.ufunc | None:
    if len(types) > 1 or dtypes.is_narrow(types[0]) or types[0] == tl.int1:
        return None
    return table.get(combine_fn.fn)


def _combine(combine_fn: Any, left: list, right: list, types: list[tl.dtype]) -> list[np.ndarray]:
    blocks = [[make_tensor(a, t) for a, t in zip(side, types, strict=True)] for side in (left, right)]
    combined = combine_fn(*blocks[0], *blocks[1])
    combined = combined if isinstance(combined, (tuple, list, tl.tuple)) else (combined,)
    return [c.to(t).handle.data for c, t in zip(combined, types, strict=True)]
