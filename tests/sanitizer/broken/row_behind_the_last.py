"""A loop puts one row too many into the peer's matrix. Its size needs no padding: the next tensor is overwritten."""

import torch
from program import command
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import iris
import iris.gluon as iris_gl
from iris.gluon import IrisDeviceCtx

KIND = "bounds"
ROWS, N = 8, 32  # 1024 bytes of int32, the alignment of the heap


@gluon.jit
def send_rows(context_tensor, source, matrix, count, N: gl.constexpr):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    layout: gl.constexpr = gl.BlockedLayout([1], [iris_gl.threads_per_warp()], [gl.num_warps()], [0])
    columns = gl.arange(0, N, layout=layout)
    for row in range(count):
        ctx.put(source + columns, matrix + row * N + columns, 1 - ctx.cur_rank)  # first


def main(ctx: iris.Iris, broken: bool) -> None:
    source = ctx.full((N,), 3 + ctx.get_rank(), dtype=torch.int32)
    matrix = ctx.zeros(ROWS, N, dtype=torch.int32)
    state = ctx.full((N,), 8, dtype=torch.int32)
    ctx.barrier()
    count = ROWS + 1 if broken else ROWS
    send_rows[(1,)](ctx.get_device_context(), source, matrix, count, N)
    ctx.barrier()
    if not broken:
        assert matrix.tolist() == [[3 + (1 - ctx.get_rank())] * N] * ROWS
        assert state.tolist() == [8] * N


if __name__ == "__main__":
    command(main)
