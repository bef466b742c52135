"""Two programs of a rank pass data by fences and a relaxed flag at gpu scope. The one that reads has no fence."""

import torch
import triton
import triton.language as tl
from program import command

import iris

KIND = "race/missing-acquire"
N = 64


@triton.jit
def pass_on(context_tensor, data, flag, result, N: tl.constexpr, BROKEN: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context_tensor)
    offsets = tl.arange(0, N)
    if tl.program_id(0) == 0:
        tl.store(data + offsets, offsets)  # first
        ctx.fence()
        tl.atomic_xchg(flag, 1, sem="relaxed", scope="gpu")
    else:
        while tl.atomic_add(flag, 0, sem="relaxed", scope="gpu") == 0:
            pass
        if not BROKEN:
            ctx.fence()
        tl.store(result + offsets, tl.load(data + offsets))  # second


def main(ctx: iris.Iris, broken: bool) -> None:
    data, result = ctx.zeros(N, dtype=torch.int32), ctx.zeros(N, dtype=torch.int32)
    flag = ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    pass_on[(2,)](ctx.get_device_context(), data, flag, result, N, broken)
    ctx.barrier()
    if not broken:
        assert result.tolist() == list(range(N))


if __name__ == "__main__":
    command(main)
