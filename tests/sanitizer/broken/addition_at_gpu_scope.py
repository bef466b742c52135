"""A counter for all ranks is added to at gpu scope: two GPUs may read the same number, and one addition is lost."""

import torch
import triton
from program import command

import iris

KIND = "race/scope"
RANKS = 3
TIMES = 4


@triton.jit
def count(context_tensor, counter, TIMES: triton.language.constexpr, BROKEN: triton.language.constexpr):
    ctx = iris.DeviceContext.initialize(context_tensor)
    for _ in range(TIMES):
        if BROKEN:
            ctx.atomic_add(counter, 1, 0, sem="relaxed", scope="gpu")  # first
        else:
            ctx.atomic_add(counter, 1, 0, sem="relaxed", scope="sys")


def main(ctx: iris.Iris, broken: bool) -> None:
    counter = ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    count[(2,)](ctx.get_device_context(), counter, TIMES, broken)
    ctx.barrier()
    if not broken and ctx.get_rank() == 0:
        assert counter.item() == 2 * TIMES * RANKS


if __name__ == "__main__":
    command(main)
