"""GEMM and one-shot all-reduce: see README.md."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from gemm_all_reduce import compare  # noqa: E402
from workload import Workload, command  # noqa: E402
from wrapper import BLOCK_M, BLOCK_N, Workspace, matmul_all_reduce  # noqa: E402

import iris  # noqa: E402


def main(ctx: iris.Iris, workload: Workload) -> None:
    workspace = Workspace(ctx, workload.m, workload.n, workload.dtype)
    compare(ctx, workload, "GEMM and one-shot all-reduce", lambda c, a, b: matmul_all_reduce(ctx, c, a, b, workspace))


def room(workload: Workload, num_ranks: int) -> int:
    tiles = (workload.m // BLOCK_M + 1) * (workload.n // BLOCK_N + 1)
    return workload.m * workload.n * workload.dtype.itemsize + 4 * tiles


if __name__ == "__main__":
    command(main, on_gpus=(4096, 8192, 14336), simulated=(256, 320, 384), room=room)
