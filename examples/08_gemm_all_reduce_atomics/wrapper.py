"""The launch of the kernel, and the memory that its calls share."""

import torch
import triton
from arguments import check_dtype, check_tensors
from kernel import gemm_all_reduce

import iris

# Additions are by rows, so a tile of float32 goes through shared memory, of which AMD's MI300 has 64 KiB.
BLOCK_M, BLOCK_N, GROUP_M = 128, 128 if torch.version.hip else 256, 8


class Workspace:
    """Sums and counts for results of ``[M, N]``. Made collectively; for one stream or graph at a time.

    On the heap: 8 M N bytes, and 4 a tile.
    """

    def __init__(self, ctx: iris.Iris, M: int, N: int) -> None:
        self.programs = 4 if iris.simulator.ACTIVE else ctx.get_cu_count()
        self.sums = ctx.zeros(2, M, N, dtype=torch.float32)
        self.arrived = ctx.zeros(triton.cdiv(M, BLOCK_M) * triton.cdiv(N, BLOCK_N), dtype=torch.int32)
        self.epochs = torch.zeros(self.programs, device=ctx.device, dtype=torch.int32)
        ctx.barrier()


def matmul_all_reduce(ctx: iris.Iris, c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, workspace: Workspace) -> None:
    """``c = a b``, added up over all ranks, on each of them. Enqueued on the current stream; can be captured.

    ``a``: ``[M, K / W]`` and ``b``: ``[K / W, N]``, this rank's part of K. ``c``: ``[M, N]``; all three anywhere.
    """
    (M, K), N = a.shape, b.shape[1]
    check_dtype(a.dtype)
    check_tensors(ctx.device, a=(a, a.dtype, M, K), b=(b, a.dtype, K, N), c=(c, c.dtype, M, N))
    if workspace.sums.shape[1:] != (M, N):
        raise ValueError(f"The workspace is for results of {list(workspace.sums.shape[1:])}, and this is of {[M, N]}.")
    # Before the additions: all ranks are past the last call, which cleared the sums that this one adds to.
    ctx.device_barrier()
    # A tile's depth is the same number of bytes in every dtype.
    gemm_all_reduce[(workspace.programs,)](
        ctx.get_device_context(), a, b, c, workspace.sums, workspace.arrived, workspace.epochs, M, N, K,
        *a.stride(), *b.stride(), *c.stride(), ctx.get_num_ranks(),
        BLOCK_M, BLOCK_N, 128 // a.element_size(), GROUP_M, num_warps=8,
    )  # fmt: skip
