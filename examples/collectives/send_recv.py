"""send, recv: activations go from stage to stage of a pipeline, each stage on a rank.

Every stage but the first receives from the one before, every one but the last sends to the one after. Only the two
ranks of a message take part in it.

Over the link: the bytes of a message once a hop, in as many steps as there are hops; a rank that has handed its message
on can take the next one.
"""

import torch
from trial import command, pattern, same, trial

import iris
from iris.ccl import Config

MICROBATCHES = 3


def main(ctx: iris.Iris, size: int, config: Config) -> None:
    rank, num_ranks, device = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_device()
    n = size // 4
    inputs, activations = (torch.empty(MICROBATCHES, n, device=device) for _ in range(2))

    def prepare(round: int) -> None:
        inputs.copy_(pattern((MICROBATCHES, n), 0, round, device))

    def call() -> None:
        for microbatch, activation in zip(inputs, activations, strict=True):
            if rank == 0:
                activation.copy_(microbatch)
            else:
                ctx.ccl.recv(activation, src=rank - 1, config=config)
            activation.add_(rank + 1)  # the work of this stage
            if rank < num_ranks - 1:
                ctx.ccl.send(activation, dst=rank + 1, config=config)

    def check(round: int) -> None:
        added = sum(range(1, rank + 2))
        same(activations, pattern((MICROBATCHES, n), 0, round, device) + added, f"rank {rank}")

    trial(ctx, "send_recv", size, prepare, call, check)


if __name__ == "__main__":
    command(main)
