"""Only rank 0 needs a workspace, so only rank 0 allocates it.

Everything after it has other offsets on the other rank, and a peer's stores land in the wrong tensors.
"""

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "asymmetric"
N = 64


@triton.jit
def send_to_root(context_tensor, rows, N: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    offsets = tl.arange(0, N)
    ctx.store(rows + ctx.cur_rank * N + offsets, 100 * ctx.cur_rank + offsets, 0)


def main(ctx: iris.Iris, broken: bool) -> None:
    if ctx.get_rank() == 0 or not broken:
        workspace = ctx.zeros(4 * N)
    rows = ctx.zeros(ctx.get_num_ranks(), N, dtype=torch.int32)
    ctx.barrier()
    send_to_root[(1,)](ctx.get_device_context(), rows, N)
    ctx.barrier()
    if not broken and ctx.get_rank() == 0:
        workspace[:N] = rows.sum(0)
        assert workspace[:N].tolist() == [100 + 2 * i for i in range(N)]
    ctx.barrier()


if __name__ == "__main__":
    command(main)
