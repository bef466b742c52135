"""Has the compiler round float32 to bf16 two elements at a time, as NVIDIA's registers hold them.

One fast instruction, F2FP, rounds two elements to a pair. A slow one, F2F, rounds a single element. The compiler makes
pairs where the result is used in pairs: a store does so, arithmetic on the rounded values does not. What is here does
so, and changes no value.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda

from iris.language.jit import jit
from iris.language.target import on_nvidia


@jit
def rounded_by_pairs(x):
    """The block ``x``, which is the result of a rounding from float32. If it is bf16, it is rounded by pairs."""
    if on_nvidia() and x.dtype == tl.bfloat16 and x.shape[0] >= 2 * cuda.num_threads():
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        return x


@triton.jit
def widen(x):
    """The block ``x`` as float32. If it is the result of a rounding from float32 to bf16, it is rounded by pairs."""
    if on_nvidia() and x.dtype == tl.bfloat16 and x.shape[0] >= 2 * cuda.num_threads():
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=&r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2
        )
    else:
        return x.to(tl.float32)
