"""Four programs count their arrivals in one counter, by relaxed additions "because only the number matters".

The receiver goes on from that number to the data, so each addition must release what its program has stored.
"""

import torch
from program import command
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import iris
import iris.gluon as iris_gl
from iris.gluon import IrisDeviceCtx

KIND = "race/missing-release"
BLOCK, PROGRAMS = 32, 4


@gluon.jit
def send(context_tensor, inbox, arrived, BLOCK: gl.constexpr, BROKEN: gl.constexpr):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    layout: gl.constexpr = gl.BlockedLayout([1], [iris_gl.threads_per_warp()], [gl.num_warps()], [0])
    offsets = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout=layout)
    ctx.store(inbox + offsets, 3 * offsets, 1)  # first
    if BROKEN:
        ctx.atomic_add(arrived, 1, 1, sem="relaxed")
    else:
        ctx.atomic_add(arrived, 1, 1, sem="release")


@gluon.jit
def receive(context_tensor, inbox, arrived, result, BLOCK: gl.constexpr, PROGRAMS: gl.constexpr):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    layout: gl.constexpr = gl.BlockedLayout([1], [iris_gl.threads_per_warp()], [gl.num_warps()], [0])
    offsets = gl.arange(0, PROGRAMS * BLOCK, layout=layout)
    # Seeing the last addition is to have synchronised with all of them: each is an atomic on what the one before left.
    ctx.wait(arrived, PROGRAMS)
    values = gl.load(inbox + offsets)  # second
    gl.store(result + offsets, values)


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
        assert result.tolist() == [3 * i for i in range(n)]


if __name__ == "__main__":
    command(main)
