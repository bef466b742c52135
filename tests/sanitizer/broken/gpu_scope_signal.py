"""The flag for another rank is released at gpu scope, which orders the data for observers on the sender's own GPU only.

The peer is outside of it, and may see the flag before the data.
"""

import torch
import triton
import triton.language as tl
from program import command

import iris

KIND = "race/scope"
N = 64


@triton.jit
def send(source, data, flag, heap_bases, N: tl.constexpr, BROKEN: tl.constexpr):
    offsets = tl.arange(0, N)
    iris.put(source + offsets, data + offsets, 0, 1, heap_bases)  # first
    if BROKEN:
        iris.atomic_xchg(flag, 1, 0, 1, heap_bases, sem="release", scope="gpu")
    else:
        iris.atomic_xchg(flag, 1, 0, 1, heap_bases, sem="release", scope="sys")


@triton.jit
def receive(data, flag, result, heap_bases, N: tl.constexpr):
    offsets = tl.arange(0, N)
    while iris.atomic_cas(flag, 1, 1, 1, 1, heap_bases, sem="acquire") != 1:
        pass
    values = iris.load(data + offsets, 1, 1, heap_bases)  # second
    tl.store(result + offsets, values)


def main(ctx: iris.Iris, broken: bool) -> None:
    source = ctx.arange(N, dtype=torch.int32)
    data, result = ctx.zeros_like(source), ctx.zeros_like(source)
    flag = ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    if ctx.get_rank() == 0:
        send[(1,)](source, data, flag, ctx.get_heap_bases(), N, broken)
    else:
        receive[(1,)](data, flag, result, ctx.get_heap_bases(), N)
    ctx.barrier()
    if not broken and ctx.get_rank() == 1:
        assert result.tolist() == list(range(N))


if __name__ == "__main__":
    command(main)
