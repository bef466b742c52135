"""The program with the highest number signals for the whole grid, as if it were the last to finish.

Programs run in any order, and a signal covers only what its own program did.
"""

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "race"
BLOCK, PROGRAMS = 32, 3


@triton.jit
def send(context_tensor, inbox, arrived, BLOCK: tl.constexpr, BROKEN: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    pid = tl.program_id(0)
    offsets = pid * BLOCK + tl.arange(0, BLOCK)
    ctx.store(inbox + offsets, 2 * offsets, 1)  # first
    if BROKEN:
        if pid == tl.num_programs(0) - 1:
            ctx.signal(arrived, tl.num_programs(0), 1)
    else:
        ctx.signal(arrived, 1, 1, op="add")


@triton.jit
def receive(context_tensor, inbox, arrived, result, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    ctx.wait(arrived, PROGRAMS)
    for block in range(PROGRAMS):
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(inbox + offsets)  # second
        tl.store(result + offsets, values)


def main(ctx: iris.Iris, broken: bool) -> None:
    n = PROGRAMS * BLOCK
    inbox, result = ctx.zeros(n, dtype=torch.int32), ctx.zeros(n, dtype=torch.int32)
    arrived = ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    if ctx.get_rank() == 0:
        send[(PROGRAMS,)](ctx.get_device_context(), inbox, arrived, BLOCK, broken)
    else:
        receive[(1,)](ctx.get_device_context(), inbox, arrived, result, BLOCK, PROGRAMS)
    ctx.barrier()
    if not broken and ctx.get_rank() == 1:
        assert result.tolist() == [2 * i for i in range(n)]


if __name__ == "__main__":
    command(main)
