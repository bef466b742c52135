"""Rank 0 launches a barrier of two programs and rank 1 one of one. Each puts its process number in a file before."""

import os
import sys
from pathlib import Path

import torch
import triton
from acceptance._launch import launch

import iris


@triton.jit
def meet(context_tensor, flags):
    iris.DeviceContext.initialize(context_tensor).barrier(flags)


def worker(rank, world_size):
    ctx = iris.iris(1 << 20)
    flags = ctx.zeros(2, 2, dtype=torch.int32)
    for _ in range(3):
        ctx.device_barrier()
    ctx.barrier()
    file = Path(sys.argv[1], f"{rank}.part")
    file.write_text(str(os.getpid()))
    file.rename(file.with_suffix(""))
    meet[(2 - rank,)](ctx.get_device_context(), flags)
    ctx.barrier()


if __name__ == "__main__":
    launch(worker)
