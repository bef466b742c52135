"""A partition arrives at an mbarrier that nobody has made.

Its word holds what another kernel has left there, so it may count any number of arrivals.
"""

import torch
from program import command
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

import iris

KIND = "uninitialised"
N = 128
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def produce(source, between, made, N: gl.constexpr):
    i = gl.arange(0, N, LINE)
    gl.store(between + i, gl.load(source + i))
    mbarrier.arrive(made, count=1)  # first


@gluon.jit
def consume(between, result, made, N: gl.constexpr):
    i = gl.arange(0, N, LINE)
    mbarrier.wait(made, 0)
    gl.store(result + i, 2 * gl.load(between + i))


@gluon.jit
def double(source, between, result, N: gl.constexpr, BROKEN: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    if not BROKEN:
        mbarrier.init(made, count=1)
    gl.warp_specialize([(produce, (source, between, made, N)), (consume, (between, result, made, N))], [4], [24])


def main(ctx: iris.Iris, broken: bool) -> None:
    source, between, result = ctx.full((N,), 3 + ctx.get_rank()), ctx.zeros(N), ctx.zeros(N)
    ctx.barrier()
    double[(1,)](source, between, result, N, broken)
    ctx.barrier()
    assert torch.equal(result, 2 * source)


if __name__ == "__main__":
    command(main)
