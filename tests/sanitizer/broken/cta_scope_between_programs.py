"""Two programs of one launch pass data at cta scope. A program is a CTA of its own, so that reaches nobody else.

No peer takes part, and gpu scope is enough: that is what the corrected twin uses.
"""

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "race/scope"
N = 64


@triton.jit
def hand_over(context_tensor, box, flag, result, N: tl.constexpr, BROKEN: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    offsets = tl.arange(0, N)
    if tl.program_id(0) == 0:
        tl.store(box + offsets, ctx.cur_rank + offsets)  # first
        if BROKEN:
            ctx.atomic_xchg(flag, 1, ctx.cur_rank, sem="release", scope="cta")
        else:
            ctx.atomic_xchg(flag, 1, ctx.cur_rank, sem="release", scope="gpu")
    else:
        while ctx.atomic_add(flag, 0, ctx.cur_rank, sem="acquire", scope="gpu") == 0:
            pass
        values = tl.load(box + offsets)  # second
        tl.store(result + offsets, values)


def main(ctx: iris.Iris, broken: bool) -> None:
    rank = ctx.get_rank()
    box, result = ctx.zeros(N, dtype=torch.int32), ctx.zeros(N, dtype=torch.int32)
    flag = ctx.zeros(1, dtype=torch.int32)
    hand_over[(2,)](ctx.get_device_context(), box, flag, result, N, broken)
    ctx.barrier()
    if not broken:
        assert result.tolist() == [rank + i for i in range(N)]


if __name__ == "__main__":
    command(main)
