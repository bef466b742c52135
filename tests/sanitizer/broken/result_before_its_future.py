"""The host copies the result of a kernel that an executor's thread launches, and asks for the future afterwards."""

from concurrent.futures import ThreadPoolExecutor

import torch
import triton
import triton.language as tl
from program import command

import iris

KIND = "race"
N, CALLS = 64, 3


@triton.jit
def double(x, result, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(result + i, 2 * tl.load(x + i))  # first


def main(ctx: iris.Iris, broken: bool) -> None:
    x = torch.arange(N)
    with ThreadPoolExecutor(1) as stream:
        for call in range(CALLS):
            x.add_(call)
            result = torch.zeros(N, dtype=torch.int64)
            future = stream.submit(double[(1,)], x, result, N)
            if not broken:
                future.result()
            values = result.cpu()  # second
            future.result()
            assert broken or torch.equal(values, 2 * x)
    ctx.barrier()


if __name__ == "__main__":
    command(main)
