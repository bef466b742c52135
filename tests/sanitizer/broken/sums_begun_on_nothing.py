"""Tokens are added to the rows of their experts, in a buffer that nobody has made zero."""

import torch
from program import command

import iris

KIND = "uninitialised"
EXPERTS, WIDTH = 4, 16


def main(ctx: iris.Iris, broken: bool) -> None:
    tokens = torch.arange(8.0)[:, None].expand(8, WIDTH)
    expert_of = torch.arange(8) % (EXPERTS - 1)
    sums = ctx.empty(EXPERTS, WIDTH) if broken else ctx.zeros(EXPERTS, WIDTH)
    ctx.barrier()
    sums.index_add_(0, expert_of, tokens)  # first
    ctx.barrier()
    if not broken:
        assert ctx.peer(sums, 1 - ctx.get_rank())[:, 3].tolist() == [0 + 3 + 6, 1 + 4 + 7, 2 + 5, 0]


if __name__ == "__main__":
    command(main)
