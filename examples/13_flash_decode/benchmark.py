"""Flash decode over keys and values shared by the ranks: see README.md. -m: sequences, -n: positions, -k: head size."""

import sys
from pathlib import Path

import click
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from workload import SIMULATED, Workload, check, command, random, report, share, size_of_means, trace, validated  # noqa: E402
from wrapper import FlashDecode  # noqa: E402

import iris  # noqa: E402

HEADS, KV_HEADS, MOST_HEADS = (6, 2, 256) if SIMULATED else (32, 8, 256)
OPTIONS = [
    click.option("--heads", type=click.IntRange(1, MOST_HEADS), default=HEADS, show_default=True),
    click.option("--kv-heads", type=click.IntRange(1, MOST_HEADS), default=KV_HEADS, show_default=True),
]


def main(ctx: iris.Iris, workload: Workload, heads: int = HEADS, kv_heads: int = KV_HEADS) -> None:
    rank, W = ctx.get_rank(), ctx.get_num_ranks()
    if heads % kv_heads:
        raise SystemExit(f"--heads is {heads}, and --kv-heads {kv_heads}: give a multiple of these.")
    batch, capacity, dim, dtype = workload.m, share(workload.n, ctx, "-n"), workload.k, workload.dtype
    q = torch.empty(batch, heads, dim, device=ctx.device, dtype=dtype)
    k, v = torch.empty(2, batch, kv_heads, capacity, dim, device=ctx.device, dtype=dtype)
    lengths = torch.empty(batch, device=ctx.device, dtype=torch.int32)
    out = torch.empty_like(q)
    decode = FlashDecode(ctx, batch, heads, kv_heads, dim, capacity, dtype)

    def keys_and_values(round: int, peer: int) -> torch.Tensor:
        return random(ctx, 1000 * (peer + 1) + round, 2, batch, kv_heads, capacity, dim, dtype=dtype)

    def lengths_of(round: int, peer: int) -> torch.Tensor:
        """All of the share in the first round; in others any part of it, and none of it for some sequences."""
        any_part = torch.arange(batch, device=ctx.device) * 7 + (peer + 1) * (round + 3) * 5
        all_of_it = torch.full_like(any_part, capacity)
        some = any_part % (capacity + 1) * ((any_part + peer) % 3 != 0)
        # The first rank has something of each sequence, lest there be none at all.
        return all_of_it if round == 0 else torch.clamp(some, min=1 if peer == 0 else 0)

    def prepare(round: int) -> None:
        q.copy_(random(ctx, round, batch, heads, dim, dtype=dtype))
        for mine, new in zip((k, v), keys_and_values(round, rank), strict=True):
            mine.copy_(new)
        lengths.copy_(lengths_of(round, rank))

    def call() -> None:
        decode(out, q, k, v, lengths)

    if workload.validate:
        for round in range(workload.rounds):
            prepare(round)
            call()
            everyone = torch.stack([keys_and_values(round, peer) for peer in range(W)])
            there = torch.stack([lengths_of(round, peer) for peer in range(W)])
            for sequence in range(batch):
                parts = [everyone[peer, :, sequence, :, : there[peer, sequence]] for peer in range(W)]
                whole = torch.cat(parts, dim=2).repeat_interleave(heads // kv_heads, dim=1)
                exact = attention(q[sequence].double(), *whole.double())
                where = f"rank {rank} in round {round}, sequence {sequence}"
                sizes = size_of_means(q[sequence][:, None], *whole)
                check(out[sequence], exact, attention(q[sequence], *whole), where, sizes)
        validated(ctx, "Flash decode", workload)
    if workload.trace:
        prepare(0)
        trace(ctx, workload, call)
    if workload.benchmark:
        prepare(0)
        with_collective = FlashDecode(ctx, batch, heads, kv_heads, dim, capacity, dtype, fused=False)
        theirs = torch.empty_like(out)
        calls = {
            "Iris, one kernel": call,
            "the same kernels, all_gather_into_tensor between them": lambda: with_collective(theirs, q, k, v, lengths),
        }
        report(ctx, f"Flash decode of {batch} sequences of {workload.n} positions, {heads} heads of {dim}, "
                    f"{kv_heads} of keys and values, among {W} ranks", calls)  # fmt: skip
        check(out, theirs.double(), theirs, f"rank {rank} beside the collective")


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Torch's, of one query for each head: ``[heads, dim]``."""
    return torch.nn.functional.scaled_dot_product_attention(q[:, None], k, v)[:, 0]


def room(workload: Workload, num_ranks: int) -> int:
    return 2 * num_ranks * workload.m * MOST_HEADS * (workload.k + 4) * 4 + workload.m * MOST_HEADS * 64


if __name__ == "__main__":
    command(main, on_gpus=(8, 32768, 128), simulated=(2, 192, 32), room=room, options=OPTIONS)
