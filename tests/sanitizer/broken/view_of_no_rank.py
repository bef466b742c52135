"""The host looks at the tensor of the rank after the last, which there is none of."""

import torch
from program import command

import iris

KIND = "rank"
N = 64


def main(ctx: iris.Iris, broken: bool) -> None:
    data = ctx.full((N,), ctx.get_rank(), dtype=torch.int32)
    ctx.barrier()
    following = ctx.get_rank() + 1 if broken else (ctx.get_rank() + 1) % ctx.get_num_ranks()
    values = ctx.peer(data, following)  # first
    assert values.tolist() == [following] * N
    ctx.barrier()


if __name__ == "__main__":
    command(main)
