"""A kernel reads what another rank sends, before anybody has waited for the message: `irecv` returns at once."""

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from program import command

import iris

KIND = "race"
N = 64


@triton.jit
def double(x, result, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(result + i, 2 * tl.load(x + i))  # second


def main(ctx: iris.Iris, broken: bool) -> None:
    x = torch.arange(N, dtype=torch.int32) + 7 * ctx.get_rank()
    got, result = torch.zeros(N, dtype=torch.int32), torch.zeros(N, dtype=torch.int32)
    peer = 1 - ctx.get_rank()
    sent, received = dist.isend(x, peer), dist.irecv(got, peer)  # first
    if not broken:
        received.wait()
    double[(1,)](got, result, N)
    if broken:
        received.wait()
    sent.wait()
    assert broken or result.tolist() == [2 * (i + 7 * peer) for i in range(N)]
    ctx.barrier()


if __name__ == "__main__":
    command(main)
