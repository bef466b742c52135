"""A tensor of torch's, which a running kernel is about to read, is given to another launch; its flag is relaxed."""

import threading

import torch
import triton
import triton.language as tl
from program import command

import iris

KIND = "race/missing-release"
N = 32


@triton.jit
def produce(scratch, begun, flag, N: tl.constexpr, SEM: tl.constexpr):
    while tl.atomic_add(begun, 0, sem="relaxed", scope="gpu") == 0:
        pass
    i = tl.arange(0, N)
    tl.store(scratch + i, 3.0 * i)  # first
    tl.debug_barrier()  # for Triton before 3.9, whose release is one thread's
    tl.atomic_xchg(flag, 1, sem=SEM, scope="gpu")


@triton.jit
def go_on(scratch, may_go_on):
    tl.atomic_xchg(may_go_on, 1, sem="relaxed", scope="gpu")


@triton.jit
def consume(scratch, begun, flag, may_go_on, result, N: tl.constexpr):
    tl.atomic_xchg(begun, 1, sem="relaxed", scope="gpu")
    while tl.atomic_add(flag, 0, sem="acquire", scope="gpu") == 0:
        pass
    while tl.atomic_add(may_go_on, 0, sem="relaxed", scope="gpu") == 0:
        pass
    i = tl.arange(0, N)
    tl.store(result + i, tl.load(scratch + i))  # second


def main(ctx: iris.Iris, broken: bool) -> None:
    scratch, result = torch.zeros(N), torch.zeros(N)
    begun, flag, may_go_on = (torch.zeros(1, dtype=torch.int32) for _ in range(3))
    other = threading.Thread(target=lambda: consume[(1,)](scratch, begun, flag, may_go_on, result, N))
    other.start()
    produce[(1,)](scratch, begun, flag, N, "relaxed" if broken else "release")
    go_on[(1,)](scratch, may_go_on)
    other.join()
    ctx.barrier()
    if not broken:
        assert result.tolist() == [3.0 * i for i in range(N)]


if __name__ == "__main__":
    command(main)
