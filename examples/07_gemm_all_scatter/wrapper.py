"""The launch of the kernel, with what has to stand between it and the neighbours' calls."""

import torch
from arguments import check_dtype, check_symmetric, check_tensors
from kernel import gemm_all_scatter

import iris

BLOCK_M, BLOCK_N, BYTES_K = 128, 256, 128


def matmul_all_scatter(ctx: iris.Iris, c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """``c = a [b of rank 0, b of rank 1, …]`` on every rank. Enqueued on the current stream; can be captured.

    ``a``: ``[M, K]``, the same on all ranks. ``b``: ``[K, N / W]``, this rank's columns. ``c``: ``[M, N]``, symmetric.
    """
    (M, K), N, W = a.shape, b.shape[1], ctx.get_num_ranks()
    check_dtype(a.dtype)
    check_tensors(ctx.device, a=(a, a.dtype, M, K), b=(b, a.dtype, K, N), c=(c, c.dtype, M, W * N))
    check_symmetric(ctx, c=c)
    mine = c[:, ctx.get_rank() * N :][:, :N]
    programs = 4 if iris.simulator.ACTIVE else ctx.get_cu_count()
    # Before the stores: all ranks are past what they did with the last call's result.
    ctx.device_barrier()
    gemm_all_scatter[(programs,)](
        ctx.get_device_context(), a, b, mine, M, N, K, *a.stride(), *b.stride(), *c.stride(), W,
        BLOCK_M, BLOCK_N, BYTES_K // a.itemsize, num_warps=8,
    )  # fmt: skip
    # After them: what the peers have stored here is visible to what comes next on this stream.
    ctx.device_barrier()
