"""The host adds up a view of a tensor that it has freed."""

import torch
from program import command

import iris

KIND = "freed"
N = 64


def main(ctx: iris.Iris, broken: bool) -> None:
    data = ctx.ones(N, dtype=torch.int32)
    half = data[N // 2 :]
    ctx.barrier()
    if broken:
        ctx.free(data)
    total = half.sum().item()  # first
    assert total == N // 2
    ctx.barrier()
    if not broken:
        ctx.free(data)


if __name__ == "__main__":
    command(main)
