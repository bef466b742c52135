"""Plain loads in a loop of the kernel's own wait for a flag that another element is raised for."""

import torch
import triton
import triton.language as tl
from program import command

import iris

KIND = "deadlock"


@triton.jit
def raise_flag(flags):
    tl.atomic_xchg(flags + 1, 1, sem="release", scope="sys")


@triton.jit
def poll(flags, number, result):
    found = tl.load(flags + number)
    while found == 0:
        found = tl.load(flags + number)  # first
    tl.store(result, found)


def main(ctx: iris.Iris, broken: bool) -> None:
    flags, result = ctx.zeros(4, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    raise_flag[(1,)](flags)
    poll[(1,)](flags, 2 if broken else 1, result)
    assert broken or result.item() == 1
    ctx.barrier()


if __name__ == "__main__":
    command(main)
