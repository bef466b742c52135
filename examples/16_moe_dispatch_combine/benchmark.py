"""Mixture of experts, dispatch and combine: see README.md. -m: tokens of a rank, -n: their length, -k: experts."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))

from workload import Workload, check, command, random, report, share, trace, validated  # noqa: E402
from wrapper import ExpertParallel, multiply  # noqa: E402

import iris  # noqa: E402

# Experts of a token.
TOP = 2
BALANCED = 2


def route(ctx: iris.Iris, round: int, rank: int, T: int, E: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each of a rank's tokens, -1 for none, and their gates, int32 and float32, ``[T, TOP]``."""
    scores = random(ctx, 10**6 * (rank + 1) + round, T, E, dtype=torch.float32)
    if round % 3 == 0:
        # Very uneven, and nothing at all for the last rank.
        scores -= torch.linspace(0, 6, E, device=ctx.device)
        if ctx.num_ranks > 1:
            scores[:, -(E // ctx.num_ranks) :] = -torch.inf
    gates, experts = scores.softmax(dim=1).topk(TOP)
    if round % 3 == 1:
        # All tokens of all ranks twice to one expert.
        experts.fill_(round % E)
    gates /= gates.sum(dim=1, keepdim=True)
    if round % 3 == 0:
        # Dropped, as if the experts were full: of some tokens the second choice, of some both.
        experts[::3, 1] = experts[::5] = -1
    return experts.int(), gates


def through_experts(
    x: torch.Tensor, experts: torch.Tensor, gates: torch.Tensor, matrices: list[torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """The layer on one rank that has all experts, in ``dtype``."""
    results = torch.zeros(*experts.shape, x.shape[1], device=x.device, dtype=dtype)
    for expert, matrix in enumerate(matrices):
        tokens, choices = torch.nonzero(experts == expert, as_tuple=True)
        results[tokens, choices] = x[tokens].to(dtype) @ matrix.to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    return (results.to(wide) * gates[:, :, None]).sum(dim=1).to(dtype)


class Vendors:
    """The same with torch.distributed, as it is usually done. The host has to wait for the counts."""

    def __init__(self, ctx: iris.Iris, num_experts: int, programs: int) -> None:
        self.W, self.E, self.programs = ctx.get_num_ranks(), num_experts, programs
        local = num_experts // self.W
        self.expert_of = torch.arange(local, device=ctx.device).repeat(self.W)

    def __call__(
        self, x: torch.Tensor, experts: torch.Tensor, gates: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        chosen = experts.flatten().long()
        by_expert = chosen.argsort(stable=True)
        sent = x[by_expert // TOP]
        counts = torch.zeros(self.E, dtype=torch.int64, device=x.device)
        counts.scatter_add_(0, chosen, torch.ones_like(chosen))
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        there, here = torch.stack((counts, theirs)).view(2, self.W, -1).sum(dim=2).tolist()
        received = x.new_empty(sum(here), x.shape[1])
        dist.all_to_all_single(received, sent, here, there)
        # By rank and then by expert, while the experts want theirs together.
        grouping = self.expert_of.repeat_interleave(theirs, output_size=len(received)).argsort(stable=True)
        grouped = received[grouping]
        results = torch.empty_like(grouped)
        multiply(results, grouped, weights, theirs.view(self.W, -1), self.programs)
        received[grouping] = results
        dist.all_to_all_single(sent, received, there, here)
        pairs = torch.empty_like(sent)
        pairs[by_expert] = sent
        return torch.bmm(gates.to(x.dtype)[:, None, :], pairs.view(*experts.shape, -1)).squeeze(1)


def main(ctx: iris.Iris, workload: Workload) -> None:
    rank, W = ctx.get_rank(), ctx.get_num_ranks()
    T, H, E, dtype = workload.m, workload.n, workload.k, workload.dtype
    local = share(E, ctx, "-k")
    if E < TOP:
        raise SystemExit(f"-k is {E}, and a token goes to {TOP} experts: give {TOP} or more.")
    layer = ExpertParallel(ctx, T, H, E, TOP, dtype)
    x = torch.empty(T, H, device=ctx.device, dtype=dtype)
    experts = torch.empty(T, TOP, device=ctx.device, dtype=torch.int32)
    gates = torch.empty(T, TOP, device=ctx.device)
    weights = torch.empty(local, H, H, device=ctx.device, dtype=dtype)
    out = torch.empty_like(x)

    def call() -> None:
        layer.dispatch(x, experts)
        layer.apply(weights)
        layer.combine(out, experts, gates)

    def matrix(round: int, expert: int) -> torch.Tensor:
        return random(ctx, 1000 * (expert + 1) + round, H, H, dtype=dtype) / H**0.5

    def prepare(round: int) -> None:
        x.copy_(random(ctx, 10**5 * (rank + 1) + round, T, H, dtype=dtype))
        for tensor, value in zip((experts, gates), route(ctx, round, rank, T, E), strict=True):
            tensor.copy_(value)
        for i in range(local):
            weights[i] = matrix(round, rank * local + i)

    if workload.validate:
        for round in range(workload.rounds):
            prepare(round)
            call()
            matrices = [matrix(round, expert) for expert in range(E)]
            exact, torchs = (through_experts(x, experts, gates, matrices, to) for to in (torch.float64, dtype))
            check(out, exact, torchs, f"rank {rank} in round {round}")
        validated(ctx, "Mixture of experts, dispatch and combine", workload)
    if workload.trace:
        prepare(BALANCED)
        trace(ctx, workload, call)
    if workload.benchmark:
        prepare(BALANCED)
        vendors = Vendors(ctx, E, layer.programs)
        call()
        torch.testing.assert_close(vendors(x, experts, gates, weights), out, rtol=0.05, atol=0.05)

        def exchange() -> None:
            layer.dispatch(x, experts)
            layer.combine(out, experts, gates)

        calls = {
            "Iris": call,
            "Iris, without the experts": exchange,
            "the experts alone": lambda: layer.apply(weights),
        }
        sizes = f"{T} tokens a rank, {H} wide, {TOP} of {E} experts each, {W} ranks"
        report(ctx, f"Dispatch and combine, as a graph: {sizes}", calls)
        # The vendor's cannot be captured.
        calls = {"Iris": call, "the same with torch.distributed": lambda: vendors(x, experts, gates, weights)}
        report(ctx, f"Dispatch and combine, call by call: {sizes}", calls, eager=True)


def room(workload: Workload, num_ranks: int) -> int:
    return ExpertParallel.room(num_ranks, workload.m, workload.n, workload.k, TOP, workload.dtype)


if __name__ == "__main__":
    command(main, on_gpus=(4096, 2048, 32), simulated=(50, 96, 12), room=room)
