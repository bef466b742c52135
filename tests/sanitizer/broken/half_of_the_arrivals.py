"""A program of a grid goes on when half of the others have arrived, and takes its neighbour to be one of them.

It polls by itself, and each arrival acquires what those before it have released: that the neighbour was among them was
luck.
The twin waits for all.
"""

import torch
import triton
import triton.language as tl
from program import command

import iris

KIND = "race"
PROGRAMS, N = 6, 32


@triton.jit
def exchange(inbox, arrived, result, N: tl.constexpr, PROGRAMS: tl.constexpr, NEEDED: tl.constexpr):
    program = tl.program_id(0)
    i = tl.arange(0, N)
    tl.store(inbox + program * N + i, program + i)  # first
    tl.debug_barrier()  # for Triton before 3.9, whose release is one thread's
    tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu")
    while tl.atomic_add(arrived, 0, sem="acquire", scope="gpu") < NEEDED:
        pass
    neighbour = (program + PROGRAMS - 1) % PROGRAMS
    tl.store(result + program * N + i, tl.load(inbox + neighbour * N + i))  # second


def main(ctx: iris.Iris, broken: bool) -> None:
    inbox, result = (torch.zeros(PROGRAMS, N, dtype=torch.int32) for _ in range(2))
    arrived = torch.zeros(1, dtype=torch.int32)
    exchange[(PROGRAMS,)](inbox, arrived, result, N, PROGRAMS, PROGRAMS // 2 if broken else PROGRAMS)
    ctx.barrier()
    assert broken or torch.equal(result, torch.roll(inbox, 1, 0))


if __name__ == "__main__":
    command(main)
