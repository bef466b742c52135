"""The launch of the kernel, and the memory that its calls share."""

import torch
import triton
from arguments import check_dtype, check_tensors
from kernel import gemm_all_reduce

import iris

BLOCK_M, BLOCK_N, GROUP_M = 128, 256, 8


class Workspace:
    """This rank's part and the flags, for results of ``[M, N]``. Made collectively; for one stream or graph at a time.

    ``dtype``: of the results, in which parts travel. On the heap: M N elements, and 4 bytes a tile.
    """

    def __init__(self, ctx: iris.Iris, M: int, N: int, dtype: torch.dtype) -> None:
        self.programs = 4 if iris.simulator.ACTIVE else ctx.get_cu_count()
        self.part = ctx.empty(M, N, dtype=dtype)
        self.flags = ctx.zeros(triton.cdiv(M, BLOCK_M) * triton.cdiv(N, BLOCK_N), dtype=torch.int32)
        ctx.barrier()


def matmul_all_reduce(ctx: iris.Iris, c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, workspace: Workspace) -> None:
    """``c = a b``, added up over all ranks, on each of them. Enqueued on the current stream; can be captured.

    ``a``: ``[M, K / W]`` and ``b``: ``[K / W, N]``, this rank's part of K. ``c``: ``[M, N]``, of the
    workspace's dtype. All three anywhere.
    """
    (M, K), N = a.shape, b.shape[1]
    check_dtype(a.dtype)
    check_tensors(ctx.device, a=(a, a.dtype, M, K), b=(b, a.dtype, K, N), c=(c, workspace.part.dtype, M, N))
    if workspace.part.shape != (M, N):
        raise ValueError(f"The workspace is for results of {list(workspace.part.shape)}, and this is of {[M, N]}.")
    # A tile's depth is the same number of bytes in every dtype.
    gemm_all_reduce[(workspace.programs,)](
        ctx.get_device_context(), a, b, c, workspace.part, workspace.flags, M, N, K,
        *a.stride(), *b.stride(), *c.stride(), ctx.get_num_ranks(),
        BLOCK_M, BLOCK_N, 128 // a.element_size(), GROUP_M, num_warps=8,
    )  # fmt: skip
