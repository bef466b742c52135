"""all_reduce: the gradients of data-parallel training become their mean, in place.

The gradients are bf16 and the mean is formed in float32 and rounded once, so it is as exact as bf16 can be with any
number of ranks, and every rank has the same bits. Nothing has to lie on the symmetric heap.

Over the link: (W - 1) times the bytes in one step if they are few, else 2 (W - 1) / W times in two.
"""

import torch
from trial import command, pattern, same, trial

import iris
from iris.ccl import Config, ReduceOp


def main(ctx: iris.Iris, size: int, config: Config) -> None:
    rank, num_ranks, device = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_device()
    n = size // 2
    gradients = torch.empty(n, dtype=torch.bfloat16, device=device)

    def of_rank(peer: int, round: int) -> torch.Tensor:
        return (pattern(n, peer, round, device) / 1000).to(torch.bfloat16)

    def prepare(round: int) -> None:
        gradients.copy_(of_rank(rank, round))

    def call() -> None:
        ctx.ccl.all_reduce(gradients, gradients, op=ReduceOp.AVG, config=config)

    def check(round: int) -> None:
        exact = sum(of_rank(peer, round).to(torch.float64) for peer in range(num_ranks)) / num_ranks
        # Half a unit in the last place of bf16, and what float32 may add to it.
        torch.testing.assert_close(gradients.to(torch.float64), exact, rtol=2**-8, atol=0)
        # Everybody's bits are those of rank 0.
        first = gradients.clone()
        ctx.ccl.broadcast(first, src=0)
        same(gradients.view(torch.int16), first.view(torch.int16), f"rank {rank}, against rank 0")

    trial(ctx, "all_reduce", size, prepare, call, check)


if __name__ == "__main__":
    command(main)
