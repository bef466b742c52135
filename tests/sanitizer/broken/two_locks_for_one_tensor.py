"""Two threads of the host fill one ordinary tensor, each with a lock; it is the same one in the twin."""

import threading

import torch
import triton
import triton.language as tl
from program import command

import iris

KIND = "race"
N, CALLS = 64, 3


@triton.jit
def fill(x, value, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(x + i, value * i)  # first


def main(ctx: iris.Iris, broken: bool) -> None:
    x = torch.zeros(N, dtype=torch.int32)
    lock = threading.Lock()
    locks = [lock, threading.Lock() if broken else lock]

    def work(number: int) -> None:
        for call in range(CALLS):
            with locks[number]:
                fill[(1,)](x, 10 * number + call, N)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert broken or x[1].item() in (CALLS - 1, 10 + CALLS - 1)
    ctx.barrier()


if __name__ == "__main__":
    command(main)
