"""Triton's language where its documentation ends: `triton.language.core`, `standard` and `semantic`.

All of these are there in Triton 3.6 to 3.9. Where one is gone, importing this file raises `MissingPartError`.
"""

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from iris.compat.parts import required

_COMPILES, _SIMULATES = "compile its kernels", "run kernels on the CPU"

# Constants and dtypes -------------------------------------------------------------------------------------------------

unwrap_constexpr = required("triton.language.core:_unwrap_if_constexpr", _SIMULATES)
"""The value of a constant; anything else as it is."""

_BUILTIN = required("triton.language.core:TRITON_BUILTIN", _COMPILES)
required("triton.language.core:get_int_dtype", _COMPILES)


def replace_unwrap_constexpr(new: Callable[[Any], Any]) -> None:
    """Let the language itself call ``new`` for `unwrap_constexpr`."""
    tl.core._unwrap_if_constexpr = new


@triton.constexpr_function
def signed_int(bitwidth):
    """The signed integers of so many bits."""
    return tl.core.get_int_dtype(bitwidth, True)


def allowed_in_kernels(cls: type) -> type:
    """Marks a class that kernels may name although Triton has not made it."""
    setattr(cls, _BUILTIN, True)
    return cls


# The semantic layer ---------------------------------------------------------------------------------------------------

# What each operation of the language means in terms of a builder's. The simulator derives its own.
TritonSemantic = required("triton.language.semantic:TritonSemantic", _SIMULATES)

# What `tl.sum`, `tl.max`, `tl.min` and `tl.cumprod` combine two elements with.
combine_sum = required("triton.language.standard:_sum_combine", _SIMULATES)
combine_max = required("triton.language.standard:_elementwise_max", _SIMULATES)
combine_min = required("triton.language.standard:_elementwise_min", _SIMULATES)
combine_product = required("triton.language.standard:_prod_combine", _SIMULATES)


# Builtins -------------------------------------------------------------------------------------------------------------

is_builtin = required("triton.language.core:is_builtin", _SIMULATES)
"""Whether the compiler carries a function out itself."""

required("triton.language.core:builtin_min", _SIMULATES)
required("triton.language.core:builtin_max", _SIMULATES)


def builtin_for(name: str) -> Callable:
    """The builtin that Python's "min" or "max" is in a kernel, as it is now: the simulator replaces it."""
    return getattr(tl.core, f"builtin_{name}")
