"""The sender raises the flag with an acquire, the receiver's half of the pair: it holds back nothing that came before.

On a GPU the data may arrive after the flag.
"""

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "race/missing-release"
N, ROWS = 32, 4


@triton.jit
def send_rows(context_tensor, rows, flag, ROWS: tl.constexpr, N: tl.constexpr, BROKEN: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    columns = tl.arange(0, N)
    theirs = ctx.translate(rows + columns, 1)  # hoisted out of the loop
    for row in range(ROWS):
        tl.store(theirs + row * N, 100 * row + columns)  # first
    if BROKEN:
        ctx.atomic_add(flag, 1, 1, sem="acquire")
    else:
        ctx.atomic_add(flag, 1, 1, sem="release")


@triton.jit
def add_rows(context_tensor, rows, flag, total, ROWS: tl.constexpr, N: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    columns = tl.arange(0, N)
    ctx.wait(flag, 1)
    added = tl.zeros((N,), dtype=tl.int32)
    for row in range(ROWS):
        added += tl.load(rows + row * N + columns)  # second
    tl.store(total + columns, added)


def main(ctx: iris.Iris, broken: bool) -> None:
    rows, total = ctx.zeros(ROWS, N, dtype=torch.int32), ctx.zeros(N, dtype=torch.int32)
    flag = ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    if ctx.get_rank() == 0:
        send_rows[(1,)](ctx.get_device_context(), rows, flag, ROWS, N, broken)
    else:
        add_rows[(1,)](ctx.get_device_context(), rows, flag, total, ROWS, N)
    ctx.barrier()
    if not broken and ctx.get_rank() == 1:
        assert total.tolist() == [100 * sum(range(ROWS)) + ROWS * i for i in range(N)]


if __name__ == "__main__":
    command(main)
