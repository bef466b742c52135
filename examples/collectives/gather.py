"""gather: the predictions of all ranks come to the rank that evaluates them.

The others pass no output: they need no room for it. Two calls that do not depend on each other run on streams of their
own, and `Work.wait` makes the current stream wait for them; the host waits for neither.

Over the link: each rank's bytes once, to the root, in one step.
"""

import contextlib

import torch
from trial import command, pattern, same, trial

import iris
from iris.ccl import Config

ROOT = 0


def main(ctx: iris.Iris, size: int, config: Config) -> None:
    rank, num_ranks, device = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_device()
    n = size // 4
    scores, labels = torch.empty(n, device=device), torch.empty(n, dtype=torch.uint8, device=device)
    all_scores = all_labels = None
    if rank == ROOT:
        all_scores = torch.empty(num_ranks * n, device=device)
        all_labels = torch.empty(num_ranks * n, dtype=torch.uint8, device=device)
    side = torch.cuda.Stream() if device.type == "cuda" else None

    def prepare(round: int) -> None:
        scores.copy_(pattern(n, rank, round, device))
        labels.copy_(scores % 10)

    def call() -> None:
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side) if side is not None else contextlib.nullcontext():
            of_labels = ctx.ccl.gather(all_labels, labels, dst=ROOT, async_op=True, config=config)
        ctx.ccl.gather(all_scores, scores, dst=ROOT, config=config)
        of_labels.wait()

    def check(round: int) -> None:
        if rank == ROOT:
            expected = torch.cat([pattern(n, peer, round, device) for peer in range(num_ranks)])
            same(all_scores, expected, f"rank {rank}, the scores")
            same(all_labels, (expected % 10).to(torch.uint8), f"rank {rank}, the labels")

    trial(ctx, "gather", size, prepare, call, check)


if __name__ == "__main__":
    command(main)
