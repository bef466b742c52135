"""all_to_all_v: tokens go to the ranks of their experts, and come back.

How many tokens each rank gets is known when the router has run, on the device. The ranks tell each other their counts
with an all_to_all of one number a rank; then counts and displacements are tensors of the device, which the host does
not look at: it enqueues all three exchanges and goes on.

Over the link: each token once there and once back, in one step each.
"""

import torch
from trial import command, pattern, same, trial

import iris
from iris.ccl import Config

HIDDEN = 16


def main(ctx: iris.Iris, size: int, config: Config) -> None:
    rank, num_ranks, device = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_device()
    num_tokens = max(1, size // 4 // HIDDEN)
    tokens = torch.empty(num_tokens, HIDDEN, device=device)
    expert = torch.empty(num_tokens, dtype=torch.int64, device=device)  # the rank that a token is for
    inbox = torch.empty(num_ranks * num_tokens, HIDDEN, device=device)  # room for all tokens of all ranks
    returned = torch.empty_like(tokens)

    def begins(counts: torch.Tensor) -> torch.Tensor:
        return counts.cumsum(0) - counts

    def prepare(round: int) -> None:
        tokens.copy_(pattern((num_tokens, HIDDEN), rank, round, device))
        # As a router would: uneven, other on each rank; in round 1, nothing at all for the last rank.
        draw = pattern(num_tokens, rank, round, device).to(torch.int64) ** 2 % 7
        expert.copy_(draw % (num_ranks - (round == 1)))

    def call() -> None:
        order = expert.argsort(stable=True)
        outbox = tokens[order]
        send = torch.stack([(expert == peer).sum() for peer in range(num_ranks)])
        receive = torch.empty_like(send)
        ctx.ccl.all_to_all(receive, send)
        there = [part * HIDDEN for part in (send, begins(send), receive, begins(receive))]
        ctx.ccl.all_to_all_v(inbox, outbox, *there, config=config)
        inbox.mul_(rank + 1)  # the expert of rank r multiplies by r + 1
        back = (*there[2:], *there[:2])
        ctx.ccl.all_to_all_v(outbox, inbox, *back, config=config)
        returned[order] = outbox

    def check(round: int) -> None:
        same(returned, tokens * (expert + 1)[:, None], f"rank {rank}, tokens that came back in round {round}")

    trial(ctx, "all_to_all_v", size, prepare, call, check)


if __name__ == "__main__":
    command(main, gluon=False)
