"""The launch of the kernel, and the memory that it counts in."""

import weakref

import torch
import triton
from arguments import check_dtype, check_symmetric, check_tensors
from kernel import gemm_all_scatter

import iris

BLOCK_M, BLOCK_N, BYTES_K = 128, 256, 128
# Of the multiprocessors of a GPU an eighth send, up to so many: as fill the links of an H200, and no more.
COMM_SMS = 16


class Workspace:
    """What the calls of one size count in. Made by all ranks together, at the first; they meet on the host."""

    def __init__(self, ctx: iris.Iris, tiles: int) -> None:
        # Who multiplies waits for nobody, so that two programs may even take turns.
        self.programs = 4 if iris.simulator.ACTIVE else max(2, ctx.get_cu_count())
        self.senders = 2 if iris.simulator.ACTIVE else min(COMM_SMS, max(1, self.programs // 8))
        self.finished = ctx.zeros(tiles, dtype=torch.int32)
        self.meetings = ctx.zeros(self.programs, ctx.get_num_ranks(), dtype=torch.int32)
        self.epochs = ctx.zeros(self.programs, dtype=torch.int32)
        # Nobody's flag is written before it has been cleared.
        ctx.barrier()


_workspaces: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def matmul_all_scatter(ctx: iris.Iris, c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """``c = a [b of rank 0, b of rank 1, …]`` on every rank. Enqueued on the current stream; can be captured.

    ``a``: ``[M, K]``, the same on all ranks. ``b``: ``[K, N / W]``, this rank's columns. ``c``: ``[M, N]``, symmetric.
    Calls of one size are on one stream, or in one graph, at a time. The first makes what they count in on the heap, and
    meets the other ranks on the host, so it is outside of graphs.
    """
    (M, K), N, W = a.shape, b.shape[1], ctx.get_num_ranks()
    check_dtype(a.dtype)
    check_tensors(ctx.device, a=(a, a.dtype, M, K), b=(b, a.dtype, K, N), c=(c, c.dtype, M, W * N))
    check_symmetric(ctx, c=c)
    mine = c[:, ctx.get_rank() * N :][:, :N]
    tiles = triton.cdiv(M, BLOCK_M) * triton.cdiv(N, BLOCK_N)
    made = _workspaces.setdefault(ctx, {})
    if (M, N) not in made:
        made[M, N] = Workspace(ctx, tiles)
    counts = made[M, N]
    gemm_all_scatter[(counts.programs,)](
        ctx.get_device_context(), counts.finished, counts.meetings, counts.epochs, a, b, mine, M, N, K,
        *a.stride(), *b.stride(), *c.stride(), W, counts.senders,
        BLOCK_M, BLOCK_N, BYTES_K // a.itemsize, num_warps=8,
    )  # fmt: skip
