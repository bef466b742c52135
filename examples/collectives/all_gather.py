"""all_gather: a layer whose weight is sharded by rows is put together before it is used.

Every rank holds M rows of the weight, and gets all W * M. The shard is ordinary memory of the device; the whole lies on
the symmetric heap, so peers write their shards into it directly.

Over the link: each shard once to each peer, in one step.
"""

import torch
from trial import command, pattern, same, trial

import iris
from iris.ccl import Config

COLUMNS = 40


def main(ctx: iris.Iris, size: int, config: Config) -> None:
    rank, num_ranks, device = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_device()
    rows = max(1, size // 4 // COLUMNS)
    shard = torch.empty(rows, COLUMNS, device=device)
    weight = ctx.empty(num_ranks * rows, COLUMNS)

    def prepare(round: int) -> None:
        shard.copy_(pattern((rows, COLUMNS), rank, round, device))

    def call() -> None:
        ctx.ccl.all_gather(weight, shard, config=config)

    def check(round: int) -> None:
        for peer, part in enumerate(weight.split(rows)):
            same(part, pattern((rows, COLUMNS), peer, round, device), f"rank {rank}, the shard of rank {peer}")

    trial(ctx, "all_gather", size, prepare, call, check)


if __name__ == "__main__":
    command(main)
