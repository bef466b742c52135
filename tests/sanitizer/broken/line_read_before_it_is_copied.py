"""Threads copy lines to shared memory, one ahead, and wait for all groups but two where one is too many already."""

import torch
from program import command
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

import iris

KIND = "race"
LINES, N = 5, 128
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))

# Triton 3.9 has other names for them.
fetch = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
block_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def double(source, result, LINES: gl.constexpr, N: gl.constexpr, BROKEN: gl.constexpr):
    lines = gl.allocate_shared_memory(gl.float32, [2, N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    i = gl.arange(0, N, LINE)
    fetch(lines.index(0), source + i)
    async_copy.commit_group()
    for line in range(LINES):
        fetch(lines.index((line + 1) % 2), source + (line + 1) * N + i, i < (LINES - line - 1) * N)  # first
        async_copy.commit_group()
        async_copy.wait_group(2 if BROKEN else 1)
        block_barrier()
        gl.store(result + line * N + i, 2 * lines.index(line % 2).load(LINE))  # second
    async_copy.wait_group(0)


def main(ctx: iris.Iris, broken: bool) -> None:
    source, result = torch.arange(float(LINES * N)), ctx.zeros(LINES * N)
    double[(1,)](source, result, LINES, N, broken)
    ctx.barrier()
    assert broken or torch.equal(result, 2 * source)


if __name__ == "__main__":
    command(main)
