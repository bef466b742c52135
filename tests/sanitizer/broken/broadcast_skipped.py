"""The last rank has its settings already, and takes no part in their broadcast: it waits in the barrier after it."""

from program import command

import iris

KIND = "deadlock"
RANKS = 3


def main(ctx: iris.Iris, broken: bool) -> None:
    last = ctx.get_rank() == ctx.get_num_ranks() - 1
    settings = {"tile": 128} if last else None
    if not (broken and last):
        settings = ctx.broadcast(settings, src=2 - broken * 2)  # first
    ctx.barrier()  # second
    assert broken or settings == {"tile": 128}


if __name__ == "__main__":
    command(main)
