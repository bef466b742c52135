"""A program polls by a plain load what another of its launch stores with a release: it sees the flag, and what else?"""

import torch
import triton
import triton.language as tl
from program import command

import iris

KIND = "race/missing-acquire"
N = 32


@triton.jit
def produce_and_consume(data, flag, result, N: tl.constexpr, BROKEN: tl.constexpr):
    i = tl.arange(0, N)
    if tl.program_id(0) == 1:
        tl.store(data + i, 7 * i)  # first
        tl.debug_barrier()  # for Triton before 3.9, whose release is one thread's
        tl.atomic_xchg(flag, 1, sem="release", scope="gpu")
    else:
        if BROKEN:
            while tl.load(flag) == 0:
                pass
        else:
            while tl.atomic_add(flag, 0, sem="acquire", scope="gpu") == 0:
                pass
        tl.store(result + i, tl.load(data + i))  # second


def main(ctx: iris.Iris, broken: bool) -> None:
    data, result = ctx.zeros(N, dtype=torch.int32), torch.zeros(N, dtype=torch.int32)
    flag = ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    produce_and_consume[(2,)](data, flag, result, N, broken)
    ctx.barrier()
    if not broken:
        assert result.tolist() == list(range(0, 7 * N, 7))


if __name__ == "__main__":
    command(main)
