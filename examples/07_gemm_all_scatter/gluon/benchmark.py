"""GEMM and all-scatter in one kernel, by warps with roles: see README.md."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from gemm_all_scatter import ON_GPUS, SIMULATED, compare, room  # noqa: E402
from workload import Workload, command  # noqa: E402
from wrapper import ELEMENTS, matmul_all_scatter  # noqa: E402

import iris  # noqa: E402


def main(ctx: iris.Iris, workload: Workload) -> None:
    W = ctx.get_num_ranks()
    if workload.dtype not in ELEMENTS:
        raise SystemExit("--datatype is fp32, and the tensor cores of this kernel take fp16 and bf16.")
    if workload.n % (8 * W) or workload.k % 8:
        raise SystemExit(
            f"-n is {workload.n} and -k {workload.k}, and TMA takes rows of 16 bytes: give multiples of {8 * W} and 8."
        )
    compare(ctx, workload, "fused, Gluon", matmul_all_scatter)


if __name__ == "__main__":
    command(main, on_gpus=ON_GPUS, simulated=SIMULATED, room=room)
