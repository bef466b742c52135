"""The sum of a tile of all ranks.

Sums are formed in float32 (float64 for float64, integers in their own type; of booleans they are the logical "or").
"""

import triton
import triton.language as tl

from iris.ccl.combine import accumulator


@triton.jit
def add_up(pointers, mask, element: tl.constexpr, ctx):
    """The sum of all ranks' values, in the order of ranks, so that it has the same bits wherever it is formed."""
    total = ctx.load(pointers, 0, mask=mask, other=0.0).to(accumulator(element))
    for rank in range(1, ctx.num_ranks):
        total += ctx.load(pointers, rank, mask=mask, other=0.0).to(accumulator(element))
    return total
