"""A histogram: the largest value falls into bin number BINS, which does not exist; the atomic adds past the bins."""

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "bounds"
N, BINS, LARGEST = 64, 7, 63


@triton.jit
def count(context_tensor, values, bins, N: tl.constexpr, BINS: tl.constexpr, LARGEST: tl.constexpr,
          BROKEN: tl.constexpr):  # fmt: skip
    ctx = DeviceContext.initialize(context_tensor)
    bin = tl.load(values + tl.arange(0, N)) * BINS // LARGEST
    if not BROKEN:
        bin = tl.minimum(bin, BINS - 1)
    # In no order, but at system scope: both ranks add to rank 0's bins.
    tl.atomic_add(ctx.translate(bins, 0) + bin, 1, sem="relaxed", scope="sys")  # first


def main(ctx: iris.Iris, broken: bool) -> None:
    values, bins = ctx.arange(N, dtype=torch.int32), ctx.zeros(BINS, dtype=torch.int32)
    ctx.barrier()
    count[(1,)](ctx.get_device_context(), values, bins, N, BINS, LARGEST, broken)
    ctx.barrier()
    if not broken and ctx.get_rank() == 0:
        assert bins.tolist() == [18] * (BINS - 1) + [20]


if __name__ == "__main__":
    command(main)
