"""Two threads of the host launch kernels on one ordinary tensor, and nothing says which is first."""

import threading

import torch
import triton
import triton.language as tl
from program import command

import iris

KIND = "race"
N = 64


@triton.jit
def fill(x, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(x + i, 3 * i)  # first


@triton.jit
def copy(x, result, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(result + i, tl.load(x + i))  # second


def main(ctx: iris.Iris, broken: bool) -> None:
    x, result = torch.zeros(N, dtype=torch.int32), torch.zeros(N, dtype=torch.int32)
    filled = threading.Event()

    def produce() -> None:
        fill[(1,)](x, N)
        filled.set()

    def consume() -> None:
        if not broken:
            filled.wait()
        copy[(1,)](x, result, N)

    threads = [threading.Thread(target=each) for each in (consume, produce)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert broken or result.tolist() == [3 * i for i in range(N)]
    ctx.barrier()


if __name__ == "__main__":
    command(main)
