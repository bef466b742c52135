"""The accumulator is made by `ctx.empty`, and the kernel adds to what is there. In a fresh heap that may well be 0."""

import torch
import triton
import triton.language as tl
from program import command

import iris

KIND = "uninitialised"
N, ROUNDS = 64, 3


@triton.jit
def accumulate(total, value, N: tl.constexpr):
    offsets = tl.arange(0, N)
    before = tl.load(total + offsets)  # first
    tl.store(total + offsets, before + value)


def main(ctx: iris.Iris, broken: bool) -> None:
    make = ctx.empty if broken else ctx.zeros
    total = make(N, dtype=torch.float32)
    for round in range(ROUNDS):
        accumulate[(1,)](total, 1.0 + round, N)
    ctx.barrier()
    if not broken:
        assert total.tolist() == [6.0] * N


if __name__ == "__main__":
    command(main)
