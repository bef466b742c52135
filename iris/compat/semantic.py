"""Of `triton.language.core`, `standard` and `semantic`: how operations of the language become those of a builder.

And of `triton.compiler.code_generator`: the class whose methods have the names of Python's constructs that it compiles.

For the simulator. All of these are there in Triton 3.6 to 3.9. Where one is gone, importing `iris` in the simulator
raises `MissingPartError`. On a GPU none of them is used.
"""

import ast
from collections.abc import Callable
from typing import Any

import triton.language as tl

from iris.compat.parts import required

_WHY = "run kernels on the CPU"

# The semantic layer, which expresses each operation by those of a builder.
TritonSemantic = required("triton.language.semantic:TritonSemantic", _WHY)

# The functions by which `tl.sum`, `tl.max`, `tl.min` and `tl.cumprod` combine two elements.
combine_sum = required("triton.language.standard:_sum_combine", _WHY)
combine_max = required("triton.language.standard:_elementwise_max", _WHY)
combine_min = required("triton.language.standard:_elementwise_min", _WHY)
combine_product = required("triton.language.standard:_prod_combine", _WHY)

unwrap_constexpr = required("triton.language.core:_unwrap_if_constexpr", _WHY)
"""The value of a constant; anything else as it is."""

is_builtin = required("triton.language.core:is_builtin", _WHY)
"""Whether a function is a builtin of the compiler."""

required("triton.language.core:builtin_min", _WHY)
required("triton.language.core:builtin_max", _WHY)

_CODE_GENERATOR = required("triton.compiler.code_generator:CodeGenerator", _WHY)


def is_compiled(node: ast.AST) -> bool:
    """Whether the compiler has a rule for such statements or expressions of Python."""
    return hasattr(_CODE_GENERATOR, f"visit_{type(node).__name__}")


def builtin_for(name: str) -> Callable:
    """The builtin by which kernels call Python's "min" or "max". Looked up anew, as the simulator replaces it."""
    return getattr(tl.core, f"builtin_{name}")


def replace_unwrap_constexpr(new: Callable[[Any], Any]) -> None:
    """Let the language itself call ``new`` for `unwrap_constexpr`."""
    tl.core._unwrap_if_constexpr = new
