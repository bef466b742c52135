"""Functions of the vendors' device libraries, such as ``libdevice.tanh``: torch's functions of the same names."""

import numpy as np
import torch
import triton.language as tl
from triton.language.extra import cuda, libdevice

from iris.compat.interpreter import TensorHandle
from iris.compat.semantic import is_builtin
from iris.errors import NotInSimulatorError
from iris.simulator import dtypes

_SAME_IN_TORCH = """
acos acosh asin asinh atan atan2 atanh ceil copysign cos cosh erf erfc erfinv exp exp2 expm1 floor fmax fmin fmod hypot
isinf isnan lgamma log log10 log1p log2 nextafter pow rsqrt signbit sin sinh sqrt tan tanh trunc
""".split()
_FUNCTIONS = {name: getattr(torch, name) for name in _SAME_IN_TORCH} | {
    "fabs": torch.abs,
    "finite": torch.isfinite,
    "isfinited": torch.isfinite,
    "isinfd": torch.isinf,
    "isnand": torch.isnan,
    "nearbyint": torch.round,
    "powi": torch.pow,
    "rint": torch.round,
    "signbitd": torch.signbit,
}


def call(symbol: str, arguments: list[TensorHandle], result: tl.dtype) -> TensorHandle:
    """What ``symbol`` of a device library returns: ``__nv_tanhf``, ``__nv_fast_expf``, ``__ocml_tanh_f32`` ...

    Raises `NotInSimulatorError` for a function that has no namesake here.
    """
    name = symbol.removeprefix("__nv_").removeprefix("fast_").removeprefix("__ocml_")
    name = name.removesuffix("_f32").removesuffix("_f64")
    function = _FUNCTIONS.get(name) or _FUNCTIONS.get(name.removesuffix("f"))
    if function is None:
        raise NotInSimulatorError(f"{symbol} of a device library")
    values = function(*(torch.from_numpy(np.array(dtypes.widen(argument))) for argument in arguments))
    return TensorHandle(values.numpy().astype(dtypes.storage(result)), result.scalar)


def install() -> None:
    """Put CUDA's functions in the place of the portable ones, which the compiler resolves by the target."""
    for name, function in vars(cuda.libdevice).items():
        if is_builtin(function) and hasattr(libdevice, name):
            setattr(libdevice, name, function)
