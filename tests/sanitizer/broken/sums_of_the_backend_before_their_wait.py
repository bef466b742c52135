"""A kernel takes a sum that the backend of Iris forms on a stream of its own; in the twin the later of two is awaited.

Calls of one stream follow each other, so that who has waited for the second has waited for the first.
"""

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from program import command

import iris

KIND = "race"
N = 64


@triton.jit
def add(x, y, result, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(result + i, tl.load(x + i) + tl.load(y + i))  # second


def main(ctx: iris.Iris, broken: bool) -> None:
    group = dist.new_group(backend="iris")
    x, y, result = torch.arange(N) * (1 + ctx.get_rank()), torch.arange(N) + ctx.get_rank(), torch.zeros(N)
    works = [dist.all_reduce(each, group=group, async_op=True) for each in (x, y)]  # first
    if not broken:
        works[1].wait()
    add[(1,)](x, y, result, N)
    works[1].wait()
    assert broken or result.tolist() == [5 * i + 1 for i in range(N)]
    ctx.barrier()
    dist.destroy_process_group(group)


if __name__ == "__main__":
    command(main)
