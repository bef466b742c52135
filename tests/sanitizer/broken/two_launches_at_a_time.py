"""Two kernels of a rank side by side, launched by two threads as on two streams: the flag between them is relaxed."""

import threading

import torch
import triton
import triton.language as tl
from program import command

import iris

KIND = "race/missing-release"
N = 32


@triton.jit
def produce(data, begun, flag, N: tl.constexpr, SEM: tl.constexpr):
    # Not before the other one runs.
    while tl.atomic_add(begun, 0, sem="relaxed", scope="gpu") == 0:
        pass
    i = tl.arange(0, N)
    tl.store(data + i, 5.0 * i)  # first
    tl.debug_barrier()  # for Triton before 3.9, whose release is one thread's
    tl.atomic_xchg(flag, 1, sem=SEM, scope="gpu")


@triton.jit
def consume(data, begun, flag, result, N: tl.constexpr):
    tl.atomic_xchg(begun, 1, sem="relaxed", scope="gpu")
    while tl.atomic_add(flag, 0, sem="acquire", scope="gpu") == 0:
        pass
    i = tl.arange(0, N)
    tl.store(result + i, tl.load(data + i))  # second


def main(ctx: iris.Iris, broken: bool) -> None:
    data, result = torch.zeros(N), torch.zeros(N)
    begun, flag = (torch.zeros(1, dtype=torch.int32) for _ in range(2))
    other = threading.Thread(target=lambda: consume[(1,)](data, begun, flag, result, N))
    other.start()
    produce[(1,)](data, begun, flag, N, "relaxed" if broken else "release")
    other.join()
    ctx.barrier()
    if not broken:
        assert result.tolist() == [5.0 * i for i in range(N)]


if __name__ == "__main__":
    command(main)
