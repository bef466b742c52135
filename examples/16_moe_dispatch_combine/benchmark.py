"""Mixture of experts, dispatch and combine: see README.md. -m: tokens of a rank, -n: their length, -k: experts."""

import sys
from pathlib import Path

import click
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from workload import SIMULATED, Workload, check, command, random, report, share, trace, validated  # noqa: E402
from wrapper import MixtureOfExperts, by_blocks, from_blocks  # noqa: E402

import iris  # noqa: E402
from iris.bench.experts import ByTorch, Routed  # noqa: E402

# Of the layer: experts of a token, and elements between an expert's two products; those of DeepSeek-V3.
TOP, WIDE = (3, 40) if SIMULATED else (8, 2048)
BALANCED = 2
FORMS = {"in the dtype": False, "fp8 there": True}


def route(ctx: iris.Iris, round: int, rank: int, T: int, E: int, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each of a rank's tokens, -1 for none, and their gates, int64 and float32, ``[T, top]``."""
    scores = random(ctx, 10**6 * (rank + 1) + round, T, E, dtype=torch.float32)
    if round % 3 == 0:
        # Very uneven, and nothing at all for the last rank.
        scores -= torch.linspace(0, 6, E, device=ctx.device)
        if ctx.num_ranks > 1 and E - E // ctx.num_ranks >= top:
            scores[:, -(E // ctx.num_ranks) :] = -torch.inf
    gates, experts = scores.softmax(dim=1).topk(top)
    if round % 3 == 1:
        # All tokens of all ranks several times to one expert.
        experts.fill_(round % E)
    gates /= gates.sum(dim=1, keepdim=True)
    if round % 3 == 0:
        # Dropped, as if the experts were full: of some tokens the last choice, of some all.
        experts[::3, -1] = experts[::5] = -1
    return experts, gates


def one_expert(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Multiplied in ``dtype``; the activation is rounded to it once."""
    wide = torch.promote_types(dtype, torch.float32)
    gate, inside = (x.to(dtype) @ up.to(dtype).t()).to(wide).chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * inside).to(dtype) @ down.to(dtype).t()


def main(ctx: iris.Iris, workload: Workload, top: int = TOP, wide: int = WIDE) -> None:
    rank, W = ctx.get_rank(), ctx.get_num_ranks()
    T, H, E, dtype = workload.m, workload.n, workload.k, workload.dtype
    local = share(E, ctx, "-k")
    if E < top:
        raise SystemExit(f"-k is {E}, and a token goes to {top} experts: give {top} or more, or another --top.")
    if H % 16:
        raise SystemExit(f"-n is {H}, and rows of fp8 are moved by 16 bytes: give a multiple of 16.")
    layer = MixtureOfExperts(ctx, T, H, wide, E, top, dtype)
    narrow = layer.experts.quantized_dtype
    x = torch.empty(T, H, device=ctx.device, dtype=dtype)
    experts = torch.empty(T, top, device=ctx.device, dtype=torch.int64)
    gates = torch.empty(T, top, device=ctx.device)
    out = torch.empty_like(x)

    def weights(round: int, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        seed = 2 * (1000 * (expert + 1) + round)
        up, down = random(ctx, seed, 2 * wide, H, dtype=dtype), random(ctx, seed + 1, H, wide, dtype=dtype)
        return up / H**0.5, down / wide**0.5

    def prepare(round: int) -> None:
        x.copy_(random(ctx, 10**5 * (rank + 1) + round, T, H, dtype=dtype))
        for tensor, value in zip((experts, gates), route(ctx, round, rank, T, E, top), strict=True):
            tensor.copy_(value)
        for i in range(local):
            layer.up[i], layer.down[i] = weights(round, rank * local + i)
        layer.quantise()

    def alone(round: int, to: torch.dtype, fp8: bool = False) -> torch.Tensor:
        """The layer on one rank that has all experts, in ``to``; ``fp8``: of tokens and weights rounded to that."""
        results = torch.zeros(T, top, H, device=ctx.device, dtype=to)
        tokens_of = from_blocks(*by_blocks(x, narrow, rows=1), rows=1) if fp8 else x
        for expert in range(E):
            tokens, choices = torch.nonzero(experts == expert, as_tuple=True)
            up, down = weights(round, expert)
            if fp8:
                up = from_blocks(*by_blocks(up, narrow))
            results[tokens, choices] = one_expert(tokens_of[tokens], up, down, to)
        sums = torch.promote_types(to, torch.float32)
        return (results.to(sums) * gates[:, :, None]).sum(dim=1).to(to)

    if workload.validate:
        for round in range(workload.rounds):
            prepare(round)
            exact = alone(round, torch.float64)
            for name, fp8 in FORMS.items():
                layer(x, experts, gates, out, fp8)
                check(out, exact, alone(round, dtype, fp8), f"rank {rank} in round {round}, {name}")
        validated(ctx, "Mixture of experts, dispatch and combine", workload)
    if workload.trace:
        prepare(BALANCED)
        trace(ctx, workload, lambda: layer(x, experts, gates, out))
    if workload.benchmark:
        prepare(BALANCED)
        measure(ctx, layer, Routed(x, experts, gates), f"{T} tokens a rank, {H} wide, {top} of {E} experts, {W} ranks")


def measure(ctx: iris.Iris, layer: MixtureOfExperts, routed: Routed, sizes: str) -> None:
    x, experts, gates = routed
    out, made = torch.empty_like(x), {}

    def apply(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ends = counts.sum(dim=0).cumsum(dim=0)
        return layer.multiply(rows, offs=ends)

    by_torch = ByTorch(ctx.num_ranks, layer.experts.num_experts, ctx.device, apply)
    exchanged_by_torch = ByTorch(ctx.num_ranks, layer.experts.num_experts, ctx.device)
    for fp8 in FORMS.values():
        received = layer.dispatch(x, experts, gates, fp8)
        made[fp8] = layer.apply(received)
        layer.experts.combine(made[fp8], received, out=out)
        torch.testing.assert_close(by_torch(routed), out, rtol=0.05, atol=0.1 if fp8 else 0.05)

    def exchange(fp8: bool) -> None:
        received = layer.dispatch(x, experts, gates, fp8)
        layer.experts.combine(made[fp8], received, out=out)

    calls = {}
    for name, fp8 in FORMS.items():
        calls[f"dispatch and combine, {name}"] = lambda fp8=fp8: exchange(fp8)
        calls[f"with the experts, {name}"] = lambda fp8=fp8: layer(x, experts, gates, out, fp8)
    if not SIMULATED:
        report(ctx, f"As a graph: {sizes}", calls)
    # torch's way waits for counts on the host, and cannot be captured.
    calls |= {
        "torch.distributed, without the experts": lambda: exchanged_by_torch(routed),
        "torch.distributed, with the experts": lambda: by_torch(routed),
    }
    report(ctx, f"Call by call: {sizes}", calls, eager=True)


def room(workload: Workload, num_ranks: int) -> int:
    """The library has memory of its own."""
    return 0


OPTIONS = (
    click.option("--top", type=click.IntRange(1), default=TOP, show_default=True, help="Experts of a token."),
    click.option("--wide", type=click.IntRange(1), default=WIDE, show_default=True, help="Elements inside an expert."),
)

if __name__ == "__main__":
    command(main, on_gpus=(4096, 7168, 256), simulated=(50, 96, 12), room=room, options=OPTIONS)
