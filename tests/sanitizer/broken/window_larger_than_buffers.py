"""Two buffers, and a sender that may be three messages ahead: it waits for the acknowledgement of a round too early.

Round 3 goes into the buffer of round 1 when only round 0 is known to have been read. It needs three buffers, or this.
"""

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "race/reuse"
N, BUFFERS, ROUNDS = 32, 2, 5


@triton.jit
def send(context_tensor, buffers, full, taken, WINDOW: tl.constexpr, BUFFERS: tl.constexpr, N: tl.constexpr,
         ROUNDS: tl.constexpr):  # fmt: skip
    ctx = DeviceContext.initialize(context_tensor)
    offsets = tl.arange(0, N)
    for round in range(ROUNDS):
        if round >= WINDOW:
            ctx.wait(taken + round - WINDOW, 1)
        ctx.store(buffers + (round % BUFFERS) * N + offsets, 100 * round + offsets, 1)  # second
        ctx.signal(full + round, 1, 1)


@triton.jit
def receive(context_tensor, buffers, full, taken, result, BUFFERS: tl.constexpr, N: tl.constexpr, ROUNDS: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    offsets = tl.arange(0, N)
    for round in range(ROUNDS):
        ctx.wait(full + round, 1)
        values = tl.load(buffers + (round % BUFFERS) * N + offsets)  # first
        tl.store(result + round * N + offsets, values)
        ctx.signal(taken + round, 1, 0)


def main(ctx: iris.Iris, broken: bool) -> None:
    buffers = ctx.zeros(BUFFERS, N, dtype=torch.int32)
    result = ctx.zeros(ROUNDS, N, dtype=torch.int32)
    full, taken = ctx.zeros(ROUNDS, dtype=torch.int32), ctx.zeros(ROUNDS, dtype=torch.int32)
    ctx.barrier()
    window = BUFFERS + 1 if broken else BUFFERS
    if ctx.get_rank() == 0:
        send[(1,)](ctx.get_device_context(), buffers, full, taken, window, BUFFERS, N, ROUNDS)
    else:
        receive[(1,)](ctx.get_device_context(), buffers, full, taken, result, BUFFERS, N, ROUNDS)
    ctx.barrier()
    if not broken and ctx.get_rank() == 1:
        assert result.tolist() == [[100 * round + i for i in range(N)] for round in range(ROUNDS)]


if __name__ == "__main__":
    command(main)
