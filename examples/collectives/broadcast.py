"""broadcast: rank 0 has read the weights, and every rank gets them.

Small tensors go to all at once. Of a large one the root sends each peer another part, which the peers pass on to each
other, so the root's link carries the weights once, not once a peer.

Over the link: each byte into each rank once; one step, or two for large tensors among more than two ranks.
"""

import torch
from trial import command, pattern, same, trial

import iris
from iris.ccl import Config

ROOT = 0


def main(ctx: iris.Iris, size: int, config: Config) -> None:
    rank, device = ctx.get_rank(), ctx.get_device()
    # Parameters of very different sizes, as a model has.
    shapes = [(max(1, size // 4 // 32), 32), (32,), (1,)]
    weights = [torch.empty(shape, device=device) for shape in shapes]

    def prepare(round: int) -> None:
        for weight in weights:
            weight.copy_(pattern(weight.shape, ROOT, round, device)) if rank == ROOT else weight.fill_(-1)

    def call() -> None:
        for weight in weights:
            ctx.ccl.broadcast(weight, src=ROOT, config=config)

    def check(round: int) -> None:
        for weight in weights:
            same(weight, pattern(weight.shape, ROOT, round, device), f"rank {rank}, a weight of {list(weight.shape)}")

    trial(ctx, "broadcast", size, prepare, call, check)


if __name__ == "__main__":
    command(main)
