"""The launches of both kernels, with what has to stand between them and the neighbours' calls."""

import torch
import triton
from arguments import check_dtype, check_symmetric, check_tensors
from kernel import pull, push

import iris

BLOCK_M, BLOCK_N = 128, 256
SEND_K = 128


def _programs(ctx: iris.Iris) -> int:
    # By push some send, and wait for nobody: so two may even take turns.
    return 4 if iris.simulator.ACTIVE else max(2, ctx.get_cu_count())


def all_gather_matmul_by_pull(ctx: iris.Iris, c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """``c = [a of rank 0; a of rank 1; …] b``. Enqueued on the current stream; can be captured.

    ``a``: ``[m, K]``, this rank's rows, symmetric. ``b``: ``[K, N]``, anywhere. ``c``: ``[W * m, N]``, anywhere.
    """
    (m, K), N, W = a.shape, b.shape[1], ctx.get_num_ranks()
    check_dtype(a.dtype)
    check_tensors(ctx.device, a=(a, a.dtype, m, K), b=(b, a.dtype, K, N), c=(c, c.dtype, W * m, N))
    check_symmetric(ctx, a=a)
    # Before the loads: what the peers wrote into their rows before the call is visible.
    ctx.device_barrier()
    # A tile's depth is the same number of bytes in every dtype.
    pull[(_programs(ctx),)](
        ctx.get_device_context(), a, b, c, m, N, K, *a.stride(), *b.stride(), *c.stride(), W,
        BLOCK_M, BLOCK_N, 128 // a.element_size(), num_warps=8,
    )  # fmt: skip
    # After them: all have read this rank's rows, which may change now.
    ctx.device_barrier()


class Workspace:
    """For calls by push: the rows of all ranks, and counts. Made collectively; for one stream or graph at a time.

    ``a``: ``[m, K]``, this rank's rows. On the heap: W m K elements, and 4 bytes a slab.
    """

    def __init__(self, ctx: iris.Iris, m: int, K: int, dtype: torch.dtype) -> None:
        check_dtype(dtype)
        W, self.programs = ctx.get_num_ranks(), _programs(ctx)
        # An eighth of the programs keep the link busy.
        self.senders = max(1, self.programs // 8)
        self.gathered = ctx.empty(W, m, K, dtype=dtype)
        # Where whoever computes this rank's rows puts them: so they are not copied.
        self.a = self.gathered[ctx.get_rank()]
        self.arrived = ctx.zeros(W, triton.cdiv(m, BLOCK_M), dtype=torch.int32)
        self.epochs = torch.zeros(self.programs, device=ctx.device, dtype=torch.int32)
        ctx.barrier()


def all_gather_matmul_by_push(ctx: iris.Iris, c: torch.Tensor, b: torch.Tensor, workspace: Workspace) -> None:
    """The same, with this rank's rows in ``workspace.a``."""
    (W, m, K), N = workspace.gathered.shape, b.shape[1]
    check_tensors(ctx.device, b=(b, workspace.a.dtype, K, N), c=(c, c.dtype, W * m, N))
    # Before the stores: all ranks are past the last call, which multiplied what these write over.
    ctx.device_barrier()
    push[(workspace.programs,)](
        ctx.get_device_context(), workspace.gathered, b, c, workspace.arrived, workspace.epochs, m, N, K,
        *b.stride(), *c.stride(), W, workspace.senders, SEND_K,
        BLOCK_M, BLOCK_N, 128 // b.element_size(), num_warps=8,
    )  # fmt: skip
