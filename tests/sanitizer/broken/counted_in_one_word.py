"""A partition fills a block of shared memory that another one reads. Both count in one word of global memory, relaxed.

A relaxed operation orders nothing, and nobody looks at the count. An mbarrier hands the block over.
"""

import torch
from program import command
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

import iris

KIND = "race"
COUNT = 128
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def fill(source, counter, block, full, BROKEN: gl.constexpr):
    i = gl.arange(0, 128, LINE)
    block.store(gl.load(source + i))  # first
    gl.atomic_add(counter, 1, sem="relaxed")
    if not BROKEN:
        mbarrier.arrive(full, count=1)


@gluon.jit
def use(counter, result, block, full, BROKEN: gl.constexpr):
    i = gl.arange(0, 128, LINE)
    gl.atomic_add(counter, 1, sem="relaxed")
    if not BROKEN:
        mbarrier.wait(full, 0)
    gl.store(result + i, 2 * block.load(LINE))  # second


@gluon.jit
def work(source, counter, result, BROKEN: gl.constexpr):
    block = gl.allocate_shared_memory(gl.int32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    gl.warp_specialize(
        [(fill, (source, counter, block, full, BROKEN)), (use, (counter, result, block, full, BROKEN))], [4], [24]
    )


def main(ctx: iris.Iris, broken: bool) -> None:
    source, result = torch.arange(COUNT, dtype=torch.int32), torch.zeros(COUNT, dtype=torch.int32)
    counter = torch.zeros(1, dtype=torch.int32)
    work[(1,)](source, counter, result, broken)
    ctx.barrier()
    assert broken or torch.equal(result, 2 * source)


if __name__ == "__main__":
    command(main)
