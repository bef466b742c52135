"""GEMM and one-shot all-reduce: every rank loads the parts of a tile from all ranks, and adds them up itself.

A program computes a tile, puts this rank's part where peers can read it, and signals the tile to all. When all ranks
have, it loads the W parts of the tile, adds them up in the order of ranks in float32, and stores the result: the same
bits on every rank. `iris.x.all_reduce_one_shot` does all of that; it keeps the flags, one a tile. While a program waits
or loads, others multiply.

Over the link, each rank: M N elements in from every peer, in one step behind a signal. The parts travel in the type of
the result.

What orders a call and the next one is in the flags too: a rank writes its part of a tile when all have read that of
the last call. So there is no barrier, neither in front nor behind. The flags only rise and are never reset.
"""

import triton
import triton.language as tl

import iris
from iris import DeviceContext


@triton.jit
def gemm_all_reduce(
    context_tensor, a, b, c, part, flags, M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    W: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """``c``: the sum of all ranks' ``a b``. ``part``: ``[M, N]``, symmetric, where this rank's product lies."""
    ctx = DeviceContext.initialize(context_tensor, num_ranks=W)
    parts = iris.x.make_tensor_view(part, M, N, N, 1)
    result = iris.x.make_tensor_view(c, M, N, stride_cm, stride_cn)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    # The same order on every rank: nobody waits for a tile that its peer computes behind one that waits for it.
    for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        # By columns within GROUP_M rows of tiles: what is computed at one time shares A and B in the L2.
        in_group = tile % (GROUP_M * tiles_n)
        first = tile // (GROUP_M * tiles_n) * GROUP_M
        height = tl.minimum(tiles_m - first, GROUP_M)
        pid_m, pid_n = first + in_group % height, in_group // height
        rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        inside_m, inside_n = (rows < M)[:, None], (columns < N)[None, :]

        k = tl.arange(0, BLOCK_K)
        x = a + (rows.to(tl.int64)[:, None] * stride_am + k[None, :] * stride_ak)
        y = b + (k[:, None] * stride_bk + columns.to(tl.int64)[None, :] * stride_bn)
        product = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for begin in range(0, K, BLOCK_K):
            here = k < K - begin
            left = tl.load(x, mask=inside_m & here[None, :], other=0)
            right = tl.load(y, mask=here[:, None] & inside_n, other=0)
            product = tl.dot(left, right, product, input_precision="ieee")
            x += BLOCK_K * stride_ak
            y += BLOCK_K * stride_bk

        iris.x.all_reduce_one_shot(iris.x.Tile(pid_m, pid_n, BLOCK_M, BLOCK_N, product), parts, result, flags, ctx)
