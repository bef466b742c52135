"""Program 0 counts the flags of the others by plain loads: it may never see them, and learns nothing by them."""

import torch
import triton
import triton.language as tl
from program import command

import iris

KIND = "race/missing-acquire"
RANKS = 1
P, N = 4, 16


@triton.jit
def work(data, flags, out, P: tl.constexpr, N: tl.constexpr, ACQUIRE: tl.constexpr):
    program, i = tl.program_id(0), tl.arange(0, N)
    if program == 0:
        arrived = 0
        while arrived < P - 1:
            arrived = 0
            for other in range(1, P):
                if ACQUIRE:
                    arrived += tl.atomic_add(flags + other, 0, sem="acquire", scope="gpu")
                else:
                    arrived += tl.load(flags + other)
        tl.store(out + i, tl.load(data + N + i))  # second
    else:
        tl.store(data + program * N + i, program + i * 1.0)  # first
        tl.atomic_xchg(flags + program, 1, sem="release", scope="gpu")


def main(ctx: iris.Iris, broken: bool) -> None:
    data, flags, out = ctx.zeros(P, N), ctx.zeros(P, dtype=torch.int32), ctx.zeros(N)
    work[(P,)](data, flags, out, P, N, not broken)
    ctx.barrier()
    assert out.tolist() == [1 + i for i in range(N)]


if __name__ == "__main__":
    command(main)
