"""A matrix has room for a whole tile of rows, of which some are filled. The kernel adds up the tile, with the rest.

The barriers are right and the memory is the tensor's own. Only nobody has ever written there.
"""

import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "uninitialised"
ROWS, TILE, N = 5, 8, 32


@triton.jit
def add_rows(context_tensor, matrix, total, rows, TILE: tl.constexpr, N: tl.constexpr, BROKEN: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    row, column = tl.arange(0, TILE)[:, None], tl.arange(0, N)[None, :]
    if BROKEN:
        tile = ctx.load(matrix + row * N + column, 1 - ctx.cur_rank)  # first
    else:
        tile = ctx.load(matrix + row * N + column, 1 - ctx.cur_rank, mask=row < rows, other=0.0)
    tl.store(total + tl.arange(0, N), tl.sum(tile, axis=0))


def main(ctx: iris.Iris, broken: bool) -> None:
    matrix, total = ctx.empty(TILE, N), ctx.zeros(N)
    matrix[:ROWS] = 1.0 + ctx.get_rank()
    ctx.barrier()
    add_rows[(1,)](ctx.get_device_context(), matrix, total, ROWS, TILE, N, broken)
    ctx.barrier()
    if not broken:
        assert total.tolist() == [ROWS * (1.0 + (1 - ctx.get_rank()))] * N


if __name__ == "__main__":
    command(main)
