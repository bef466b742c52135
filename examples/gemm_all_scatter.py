"""What 07, 10, 11 and 12 share: data, validation and times of a product whose columns are split and sent to all."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from workload import Workload, check, random, report, share, size_of_sums, trace, validated

import iris

# m, n and k, if the user does not say.
ON_GPUS, SIMULATED = (8192, 4608, 36864), (256, 288, 192)


def compare(ctx: iris.Iris, workload: Workload, name: str, matmul_all_scatter: Callable[..., None]) -> None:
    """Validate and time ``matmul_all_scatter(ctx, c, a, b)``, as the workload says. ``n`` is the whole of N."""
    rank, W = ctx.get_rank(), ctx.get_num_ranks()
    M, K, N, dtype = workload.m, workload.k, share(workload.n, ctx, "-n"), workload.dtype
    a = torch.empty(M, K, device=ctx.device, dtype=dtype)
    b = torch.empty(K, N, device=ctx.device, dtype=dtype)
    c = ctx.empty(M, W * N, dtype=dtype)

    def call() -> None:
        matmul_all_scatter(ctx, c, a, b)

    def prepare(round: int) -> None:
        a.copy_(random(ctx, round, M, K, dtype=dtype))
        b.copy_(random(ctx, 1000 * (rank + 1) + round, K, N, dtype=dtype))

    if workload.validate:
        for round in range(workload.rounds):
            prepare(round)
            call()
            everyone = [random(ctx, 1000 * (peer + 1) + round, K, N, dtype=dtype) for peer in range(W)]
            whole = torch.cat(everyone, dim=1)
            exact, where = a.double() @ whole.double(), f"rank {rank} in round {round}"
            check(c, exact, a @ whole, where, size_of_sums(a, whole))
        validated(ctx, f"GEMM and all-scatter, {name}", workload)
    if workload.trace:
        prepare(0)
        trace(ctx, workload, call)
    if workload.benchmark:
        prepare(0)
        product, gathered = torch.empty(M, N, device=ctx.device, dtype=dtype), torch.empty_like(c)

        def vendors() -> None:
            torch.mm(a, b, out=product)
            # By rank along the first dimension: what NCCL can do without a transposition, which is left out.
            dist.all_gather_into_tensor(gathered.view(W * M, N), product)

        calls = {
            f"Iris, {name}": call,
            "vendor's GEMM, then all-gather": vendors,
            "vendor's GEMM alone": lambda: torch.mm(a, b, out=product),
        }
        report(ctx, f"GEMM and all-scatter of {M} x {W * N} x {K} among {W} ranks", calls)


def room(workload: Workload, num_ranks: int) -> int:
    """Bytes of the result, and more than the flags of 10 and 11 have, four for each tile of 128 x 256."""
    columns = workload.n // num_ranks
    tiles = (workload.m // 128 + 1) * (columns // 256 + 1)
    return workload.m * workload.n * workload.dtype.itemsize + 4 * tiles
