"""all_to_all: from "my tokens, all heads" to "all tokens, my heads", as attention over a split sequence needs it.

Every rank has M tokens, each with the W * N columns of all heads: column chunk r belongs to rank r. Afterwards chunk
s of the result holds this rank's N columns of the tokens of rank s. No transposition before or after: the kernel
reads rows that are apart.

Over the link: (W - 1) / W times the bytes of the input, in one step.
"""

import torch
from trial import command, pattern, same, trial

import iris
from iris.ccl import Config

COLUMNS = 24


def main(ctx: iris.Iris, size: int, config: Config) -> None:
    rank, num_ranks, device = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_device()
    shape = (max(1, size // 4 // COLUMNS // num_ranks), COLUMNS * num_ranks)
    by_token = torch.empty(shape, device=device)
    by_head = ctx.empty(shape)

    def prepare(round: int) -> None:
        by_token.copy_(pattern(shape, rank, round, device))

    def call() -> None:
        ctx.ccl.all_to_all(by_head, by_token, config=config)

    def check(round: int) -> None:
        for peer, tokens in enumerate(by_head.split(COLUMNS, dim=1)):
            mine = pattern(shape, peer, round, device)[:, rank * COLUMNS : (rank + 1) * COLUMNS]
            same(tokens, mine, f"rank {rank}, the tokens of rank {peer}")

    trial(ctx, "all_to_all", size, prepare, call, check)


if __name__ == "__main__":
    command(main)
