"""A kernel scales a tensor while it is sent. Reading it meanwhile is right."""

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from program import command

import iris

KIND = "race"
N = 64


@triton.jit
def scale(x, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(x + i, 3 * tl.load(x + i))  # second


@triton.jit
def add_up(x, result, N: tl.constexpr):
    tl.store(result, tl.sum(tl.load(x + tl.arange(0, N))))


def main(ctx: iris.Iris, broken: bool) -> None:
    rank, result = ctx.get_rank(), torch.zeros(1, dtype=torch.int32)
    x, got = torch.arange(N, dtype=torch.int32) + 7 * rank, torch.zeros(N, dtype=torch.int32)
    sent = dist.isend(x, 1 - rank)  # first
    dist.recv(got, 1 - rank)
    add_up[(1,)](x, result, N)
    if not broken:
        sent.wait()
    scale[(1,)](x, N)
    if broken:
        sent.wait()
    assert broken or got.tolist() == [i + 7 * (1 - rank) for i in range(N)]
    assert result.item() == sum(range(N)) + 7 * rank * N
    ctx.barrier()


if __name__ == "__main__":
    command(main)
