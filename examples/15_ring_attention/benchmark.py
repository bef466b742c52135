"""Attention over a sequence that the ranks share: see README.md. -m: heads, -n: positions, -k: head size."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from workload import Workload, check, command, random, report, share, size_of_means, trace, validated  # noqa: E402
from wrapper import GatherThenAttend, RingAttention, SendAndAttend  # noqa: E402

import iris  # noqa: E402


def main(ctx: iris.Iris, workload: Workload) -> None:
    rank, W = ctx.get_rank(), ctx.get_num_ranks()
    heads, dim, dtype = workload.m, workload.k, workload.dtype
    if workload.n % (2 * W):
        raise SystemExit(f"-n is {workload.n}, which {W} ranks cannot share: give a multiple of {2 * W}.")
    length = share(workload.n, ctx, "-n") // 2
    q, k, v = torch.empty(3, heads, 2, length, dim, device=ctx.device, dtype=dtype)
    out = torch.empty_like(q)

    def tensors(round: int, peer: int) -> torch.Tensor:
        return random(ctx, 1000 * (peer + 1) + round, 3, heads, 2, length, dim, dtype=dtype)

    def prepare(round: int) -> None:
        for mine, new in zip((q, k, v), tensors(round, rank), strict=True):
            mine.copy_(new)

    def positions(peer: int) -> torch.Tensor:
        chunks = torch.tensor([[peer], [2 * W - 1 - peer]], device=ctx.device)
        return (chunks * length + torch.arange(length, device=ctx.device)).flatten()

    def validate(round: int, causal: bool) -> None:
        everyone = torch.stack([tensors(round, peer)[1:] for peer in range(W)])
        everywhere = torch.cat([positions(peer) for peer in range(W)])
        seen = (everywhere <= positions(rank)[:, None]) | (not causal)
        for head in range(heads):
            # One head at a time: scores in float64 are large.
            inputs = q[head].flatten(0, 1), *(everyone[:, i, head].flatten(0, 2) for i in range(2))
            exact, torchs = attention(*(x.double() for x in inputs), seen), attention(*inputs, seen)
            where = f"rank {rank} in round {round}, head {head}, {'causal' if causal else 'whole'}"
            check(out[head].flatten(0, 1), exact, torchs, where, size_of_means(*inputs, seen))

    for causal in (True, False):
        sizes = (ctx, heads, length, dim, dtype, causal)
        ring = RingAttention(*sizes)
        if workload.validate:
            for round in range(workload.rounds):
                prepare(round)
                ring(out, q, k, v)
                validate(round, causal)
            validated(ctx, f"Ring attention, {'causal' if causal else 'whole'}", workload)
        if workload.trace and causal:
            prepare(0)
            trace(ctx, workload, lambda: ring(out, q, k, v))  # noqa: B023
        if workload.benchmark:
            prepare(0)
            theirs, gather, send = torch.empty_like(out), GatherThenAttend(*sizes), SendAndAttend(*sizes)
            calls = {
                "Iris, one kernel": lambda: ring(out, q, k, v),  # noqa: B023
                "all-gather, then attention": lambda: gather(theirs, q, k, v),  # noqa: B023
                "messages beside the attention of each step": lambda: send(theirs, q, k, v),  # noqa: B023
                "attention alone, everything gathered before": lambda: gather.alone(theirs, q),  # noqa: B023
            }
            report(ctx, f"{'Causal' if causal else 'Whole'} attention, {heads} heads of {dim}, {workload.n} positions "
                        f"among {W} ranks", calls)  # fmt: skip
            check(out, theirs.double(), theirs, f"rank {rank} beside torch.distributed")


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Torch's, of one head."""
    return torch.nn.functional.scaled_dot_product_attention(q[None, None], k[None, None], v[None, None], seen)[0, 0]


def room(workload: Workload, num_ranks: int) -> int:
    # Two times: causal and not.
    block = 2 * workload.m * (workload.n // num_ranks) * workload.k * workload.dtype.itemsize
    return 2 * (max(1, num_ranks - 1) * block + workload.m * (num_ranks + 1) * 32)


if __name__ == "__main__":
    command(main, on_gpus=(16, 16384, 128), simulated=(2, 240, 32), room=room)
