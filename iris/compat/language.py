"""Of `triton.language.core`: the mark by which Triton's compiler recognises a builtin, and integer types by width.

`TRITON_BUILTIN` and `get_int_dtype` are there in Triton 3.6 to 3.9. Where one is gone, importing `iris` raises
`MissingPartError`. What only the simulator needs of the language is in `iris.compat.semantic`.
"""

import triton
import triton.language as tl

from iris.compat.parts import required

_COMPILES = "compile its kernels"

_BUILTIN = required("triton.language.core:TRITON_BUILTIN", _COMPILES)
required("triton.language.core:get_int_dtype", _COMPILES)


def allowed_in_kernels(cls: type) -> type:
    """Decorate a class that kernels may name, though it is not Triton's."""
    setattr(cls, _BUILTIN, True)
    return cls


@triton.constexpr_function
def signed_int(bitwidth):
    """The signed integer type of so many bits."""
    return tl.core.get_int_dtype(bitwidth, True)
