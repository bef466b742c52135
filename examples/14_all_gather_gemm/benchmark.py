"""All-gather and GEMM, by pull and by push: see README.md."""

import sys
from pathlib import Path

import click
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))

from workload import Workload, check, command, random, report, share, size_of_sums, trace, validated  # noqa: E402
from wrapper import BLOCK_M, Workspace, all_gather_matmul_by_pull, all_gather_matmul_by_push  # noqa: E402

import iris  # noqa: E402

DIRECTION = click.option("--pull/--push", "pull", default=None, help="One of the two kernels alone.")


def main(ctx: iris.Iris, workload: Workload, pull: bool | None = None) -> None:
    rank, W = ctx.get_rank(), ctx.get_num_ranks()
    m, N, K, dtype = share(workload.m, ctx, "-m"), workload.n, workload.k, workload.dtype
    # By pull, peers read it.
    a = ctx.empty(m, K, dtype=dtype)
    b = torch.empty(K, N, device=ctx.device, dtype=dtype)
    c = torch.empty(W * m, N, device=ctx.device, dtype=dtype)
    workspace = Workspace(ctx, m, K, dtype)

    def prepare(round: int) -> torch.Tensor:
        whole = random(ctx, round, W * m, K, dtype=dtype)
        for rows in (a, workspace.a):
            rows.copy_(whole[rank * m :][:m])
        b.copy_(random(ctx, 1000 * (rank + 1) + round, K, N, dtype=dtype))
        return whole

    ways = {
        "by pull": lambda: all_gather_matmul_by_pull(ctx, c, a, b),
        "by push": lambda: all_gather_matmul_by_push(ctx, c, b, workspace),
    }
    if pull is not None:
        del ways["by push" if pull else "by pull"]
    if workload.validate:
        for way, (name, call) in enumerate(ways.items()):
            for round in range(workload.rounds):
                whole = prepare(way * workload.rounds + round)
                call()
                exact, where = whole.double() @ b.double(), f"rank {rank} in round {round}, {name}"
                check(c, exact, whole @ b, where, size_of_sums(whole, b))
            validated(ctx, f"All-gather and GEMM, {name}", workload)
    if workload.trace:
        prepare(0)
        trace(ctx, workload, lambda: [call() for call in ways.values()])
    if workload.benchmark:
        prepare(0)
        gathered = torch.empty(W * m, K, device=ctx.device, dtype=dtype)

        def vendors() -> None:
            dist.all_gather_into_tensor(gathered, a)
            torch.mm(gathered, b, out=c)

        calls = {
            **{f"Iris, {name}": call for name, call in ways.items()},
            "Iris, ctx.ops.all_gather_matmul": lambda: ctx.ops.all_gather_matmul(c, a, b),
            "vendor's all-gather, then GEMM": vendors,
            "vendor's GEMM alone": lambda: torch.mm(gathered, b, out=c),
        }
        report(ctx, f"All-gather and GEMM of {W * m} x {N} x {K} among {W} ranks", calls)


def room(workload: Workload, num_ranks: int) -> int:
    # A rank's rows, and those of all.
    return 2 * workload.m * workload.k * workload.dtype.itemsize + 4 * (workload.m // BLOCK_M + num_ranks)


if __name__ == "__main__":
    command(main, on_gpus=(8192, 2048, 8192), simulated=(576, 320, 192), room=room, options=[DIRECTION])
