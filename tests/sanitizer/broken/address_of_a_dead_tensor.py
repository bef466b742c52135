"""A table holds the addresses of tensors, which does not keep them alive: when the list is gone, so is their memory."""

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "freed"
N, PARTS = 32, 3


@triton.jit
def add_parts(context_tensor, table, result, N: tl.constexpr, PARTS: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    offsets = tl.arange(0, N)
    total = tl.zeros((N,), dtype=tl.int32)
    for i in range(PARTS):
        part = tl.load(table + i).to(tl.pointer_type(tl.int32))
        total += ctx.load(part + offsets, 1 - ctx.cur_rank)  # first
    tl.store(result + offsets, total)


def main(ctx: iris.Iris, broken: bool) -> None:
    rank = ctx.get_rank()
    parts = [ctx.full((N,), 10 * rank + i, dtype=torch.int32) for i in range(PARTS)]
    table = torch.tensor([part.data_ptr() for part in parts], device=ctx.device)
    result = ctx.zeros(N, dtype=torch.int32)
    if broken:
        del parts
    ctx.barrier()
    add_parts[(1,)](ctx.get_device_context(), table, result, N, PARTS)
    ctx.barrier()
    if not broken:
        assert result.tolist() == [PARTS * 10 * (1 - rank) + sum(range(PARTS))] * N
        del parts


if __name__ == "__main__":
    command(main)
