"""What 08 and 09 share: data, validation and times of a product that is split along K and added up over the ranks."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from workload import Workload, check, random, report, share, size_of_sums, trace, validated

import iris


def compare(
    ctx: iris.Iris, workload: Workload, name: str, matmul_all_reduce: Callable[[torch.Tensor, ...], None]
) -> None:
    """Validate and time ``matmul_all_reduce(c, a, b)``, as the workload says. ``k`` is the whole of K."""
    rank, W = ctx.get_rank(), ctx.get_num_ranks()
    M, N, K, dtype = workload.m, workload.n, share(workload.k, ctx, "-k"), workload.dtype
    a = torch.empty(M, K, device=ctx.device, dtype=dtype)
    b = torch.empty(K, N, device=ctx.device, dtype=dtype)
    c = torch.empty(M, N, device=ctx.device, dtype=dtype)

    def call() -> None:
        matmul_all_reduce(c, a, b)

    def prepare(round: int) -> tuple[torch.Tensor, torch.Tensor]:
        left = random(ctx, round, M, W * K, dtype=dtype)
        right = random(ctx, 1000 + round, W * K, N, dtype=dtype)
        a.copy_(left[:, rank * K :][:, :K])
        b.copy_(right[rank * K :][:K])
        return left, right

    if workload.validate:
        for round in range(workload.rounds):
            left, right = prepare(round)
            call()
            exact, where = left.double() @ right.double(), f"rank {rank} in round {round}"
            check(c, exact, left @ right, where, size_of_sums(left, right))
        validated(ctx, name, workload)
    if workload.trace:
        prepare(0)
        trace(ctx, workload, call)
    if workload.benchmark:
        prepare(0)
        other = torch.empty_like(c)

        def vendors() -> None:
            torch.mm(a, b, out=other)
            dist.all_reduce(other)

        calls = {
            f"Iris, {name}": call,
            "Iris, ctx.ops.matmul_all_reduce": lambda: ctx.ops.matmul_all_reduce(other, a, b),
            "vendor's GEMM, then all-reduce": vendors,
            "vendor's GEMM alone": lambda: torch.mm(a, b, out=other),
        }
        report(ctx, f"GEMM and all-reduce of {M} x {N} x {W * K} among {W} ranks", calls)
