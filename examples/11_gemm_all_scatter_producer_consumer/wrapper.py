"""The launches of the two kernels, on two streams, and the memory that they count in."""

import contextlib
import weakref

import torch
import triton
from arguments import check_dtype, check_symmetric, check_tensors
from kernel import all_scatter, gemm

import iris

BLOCK_M, BLOCK_N, BYTES_K = 128, 256, 128
# Of the multiprocessors of a GPU an eighth send, up to so many: as fill the links of an H200, and no more.
COMM_SMS = 16


class Workspace:
    """What the calls of one size count in. Made by all ranks together, at the first; they meet on the host."""

    def __init__(self, ctx: iris.Iris, tiles: int) -> None:
        simulated, multiprocessors = iris.simulator.ACTIVE, ctx.get_cu_count()
        if multiprocessors < 2 and not simulated:
            raise ValueError(
                "Two kernels run side by side, and this GPU has one multiprocessor: take example 10 or 07."
            )
        self.consumers = 2 if simulated else min(COMM_SMS, max(1, multiprocessors // 8))
        self.producers = 4 if simulated else multiprocessors - self.consumers
        self.side = None if simulated else torch.cuda.Stream(ctx.device)
        self.finished = ctx.zeros(tiles, dtype=torch.int32)
        self.meetings = ctx.zeros(self.consumers, ctx.get_num_ranks(), dtype=torch.int32)
        self.produced = ctx.zeros(self.producers, dtype=torch.int32)
        self.consumed = ctx.zeros(self.consumers, dtype=torch.int32)
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
    # The fork comes before the GEMM, or the other kernel would begin after it.
    if counts.side is not None:
        counts.side.wait_stream(torch.cuda.current_stream())
    # The producer first, which waits for nobody. On a GPU, loading a kernel may have to wait for those that run, and so
    # must not come after one that waits. In the simulator, which has no streams, one launch is over before the next.
    gemm[(counts.producers,)](
        ctx.get_device_context(), counts.finished, counts.produced, a, b, mine, M, N, K,
        *a.stride(), *b.stride(), *c.stride(), W, BLOCK_M, BLOCK_N, BYTES_K // a.itemsize, num_warps=8,
    )  # fmt: skip
    with contextlib.nullcontext() if counts.side is None else torch.cuda.stream(counts.side):
        all_scatter[(counts.consumers,)](
            ctx.get_device_context(), counts.finished, counts.meetings, counts.consumed, mine, M, N, *c.stride(),
            W, BLOCK_M, BLOCK_N, num_warps=8,
        )  # fmt: skip
    # The join: what comes next on the caller's stream comes after both.
    if counts.side is not None:
        torch.cuda.current_stream().wait_stream(counts.side)
