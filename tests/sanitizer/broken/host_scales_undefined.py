"""The host scales all rows of a gradient buffer in place, and peers have filled all but the last."""

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "uninitialised"
ROWS, N = 4, 32


@triton.jit
def send(context_tensor, gradients, ROWS: tl.constexpr, N: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    for row in range(ROWS - 1):
        place = row * N + tl.arange(0, N)
        ctx.store(gradients + place, (8.0 * row + ctx.cur_rank).to(tl.float64), 1 - ctx.cur_rank)


def main(ctx: iris.Iris, broken: bool) -> None:
    gradients = ctx.empty(ROWS, N, dtype=torch.float64)
    ctx.barrier()
    send[(1,)](ctx.get_device_context(), gradients, ROWS, N)
    ctx.barrier()
    filled = gradients if broken else gradients[:-1]
    filled.mul_(0.5)  # first
    if not broken:
        assert filled[:, 7].tolist() == [(8 * row + 1 - ctx.get_rank()) / 2 for row in range(ROWS - 1)]


if __name__ == "__main__":
    command(main)
