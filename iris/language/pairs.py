"""Elements of bf16 by pairs, as NVIDIA's registers hold them.

Float32 becomes a pair of bf16 by one fast instruction, F2FP, and one element alone by a slow one, F2F. The compiler
makes pairs where somebody asks for them: a store does, and arithmetic on what has been rounded does not.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda

from iris.language.jit import jit
from iris.language.target import on_nvidia


@jit
def rounded_by_pairs(x):
    """The block ``x``, which has been rounded from float32; if it is bf16, by pairs."""
    if on_nvidia() and x.dtype == tl.bfloat16 and x.shape[0] >= 2 * cuda.num_threads():
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        return x


@triton.jit
def widen(x):
    """The block ``x`` in float32. If it is bf16 that has been rounded from float32, that was done by pairs."""
    if on_nvidia() and x.dtype == tl.bfloat16 and x.shape[0] >= 2 * cuda.num_threads():
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=&r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2
        )
    else:
        return x.to(tl.float32)
