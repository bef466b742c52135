"""All-gather by stores, into the row that has the receiver's number instead of the sender's.

The receiver writes that row itself, and nobody knows whose values stay.
"""

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "race"
N = 64


@triton.jit
def all_gather(context_tensor, rows, N: tl.constexpr, BROKEN: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    columns = tl.arange(0, N)
    values = 100 * ctx.cur_rank + columns
    tl.store(rows + ctx.cur_rank * N + columns, values)  # first
    for peer in range(ctx.num_ranks):
        if peer != ctx.cur_rank:
            if BROKEN:
                row = peer
            else:
                row = ctx.cur_rank
            ctx.store(rows + row * N + columns, values, peer)  # second


def main(ctx: iris.Iris, broken: bool) -> None:
    rows = ctx.zeros(ctx.get_num_ranks(), N, dtype=torch.int32)
    ctx.barrier()
    all_gather[(1,)](ctx.get_device_context(), rows, N, broken)
    ctx.barrier()
    if not broken:
        assert rows.tolist() == [[100 * rank + i for i in range(N)] for rank in range(ctx.get_num_ranks())]


if __name__ == "__main__":
    command(main)
