"""GEMM and all-scatter, one after the other: see README.md."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from gemm_all_scatter import ON_GPUS, SIMULATED, compare, room  # noqa: E402
from workload import Workload, command  # noqa: E402
from wrapper import matmul_all_scatter  # noqa: E402

import iris  # noqa: E402


def main(ctx: iris.Iris, workload: Workload) -> None:
    compare(ctx, workload, "bulk-synchronous", matmul_all_scatter)


if __name__ == "__main__":
    command(main, on_gpus=ON_GPUS, simulated=SIMULATED, room=room)
