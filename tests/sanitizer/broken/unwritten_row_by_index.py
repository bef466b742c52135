"""A table from which the host picks rows by index, one of them a row that no peer has sent."""

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "uninitialised"
ROWS, N = 6, 32


@triton.jit
def send_even_rows(context_tensor, table, ROWS: tl.constexpr, N: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    for row in range(0, ROWS, 2):
        place = row * N + tl.arange(0, N)
        ctx.store(table + place, place + ctx.cur_rank, 1 - ctx.cur_rank)


def main(ctx: iris.Iris, broken: bool) -> None:
    table = ctx.empty(ROWS, N, dtype=torch.int64)
    ctx.barrier()
    send_even_rows[(1,)](ctx.get_device_context(), table, ROWS, N)
    ctx.barrier()
    wanted = torch.tensor([4, 3 if broken else 2])
    found = table[wanted].sum(1)  # first
    if not broken:
        first = torch.arange(N).sum().item() + N * (1 - ctx.get_rank())
        assert found.tolist() == [first + 4 * N * N, first + 2 * N * N]


if __name__ == "__main__":
    command(main)
