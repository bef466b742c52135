"""The launch of the kernel, and the same as a step that autograd can go back over."""

import torch
from arguments import check_symmetric, check_tensors
from kernel import gemm_all_scatter
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import iris

BLOCK_M, BLOCK_N, BLOCK_K = 128, 256, 64
# As many as fit shared memory, of 48 KiB each, beside the products of a tile.
STAGES = 3
ELEMENTS = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


def matmul_all_scatter(ctx: iris.Iris, c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """``c = a [b of rank 0, b of rank 1, …]`` on every rank. Enqueued on the current stream; can be captured.

    ``a``: ``[M, K]``, the same on all ranks. ``b``: ``[K, N / W]``, this rank's columns. ``c``: ``[M, N]``, symmetric.
    All of one dtype, fp16 or bf16; the rows of ``a`` and ``b`` begin at multiples of 16 bytes, as TMA has it.
    """
    (M, K), N, W = a.shape, b.shape[1], ctx.get_num_ranks()
    if a.dtype not in ELEMENTS:
        raise ValueError(f"The kernel multiplies float16 or bfloat16, and was given {a.dtype}.")
    check_tensors(ctx.device, a=(a, a.dtype, M, K), b=(b, a.dtype, K, N), c=(c, a.dtype, M, W * N))
    check_symmetric(ctx, c=c)
    for name, matrix in (("a", a), ("b", b)):
        if matrix.stride(1) != 1 or matrix.stride(0) * matrix.itemsize % 16 or matrix.data_ptr() % 16:
            raise ValueError(
                f"{name} is not by rows that begin at multiples of 16 bytes: its strides are {matrix.stride()}."
            )
    mine = c[:, ctx.get_rank() * N :][:, :N]
    programs = 3 if iris.simulator.ACTIVE else ctx.get_cu_count()
    # Before the stores: all ranks are past what they did with the last call's result.
    ctx.device_barrier()
    gemm_all_scatter[(programs,)](
        ctx.get_device_context(), _blocks(a, BLOCK_M // 2, BLOCK_K), _blocks(b, BLOCK_K, BLOCK_N), mine, M, N, K,
        *c.stride(), ctx.get_num_ranks(), STAGES, num_warps=4,
    )  # fmt: skip
    # After them: what the peers have stored here is visible to what comes next on this stream.
    ctx.device_barrier()


def _blocks(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """What TMA fetches such blocks of the matrix by."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], ELEMENTS[matrix.dtype])
    return TensorDescriptor.from_tensor(matrix, [rows, columns], layout)


class MatmulAllScatter(torch.autograd.Function):
    """``MatmulAllScatter.apply(a, b, ctx)``: `matmul_all_scatter` into a new tensor on the heap, with gradients.

    The loss is the sum of what all ranks make of their own copies of the result. A rank's columns are in all of these
    copies, so their gradient is the sum of all ranks', which a reduce-scatter forms; from that come the gradients of
    this rank's own ``a`` and ``b``.

    The caller guarantees that every rank goes forward and back in the same order, and that the loss is such a sum:
    ranks which all compute the same loss from the same copies count it W times. The gradient of ``a`` is what came of
    this rank's columns; where ``a`` is one tensor that all ranks hold, its gradient is the sum over the ranks.
    """

    @staticmethod
    def forward(call, a: torch.Tensor, b: torch.Tensor, ctx: iris.Iris) -> torch.Tensor:
        call.save_for_backward(a, b)
        call.ctx = ctx
        c = ctx.empty(len(a), b.shape[1] * ctx.get_num_ranks(), dtype=a.dtype)
        matmul_all_scatter(ctx, c, a, b)
        return c

    @staticmethod
    def backward(call, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        a, b = call.saved_tensors
        M, N, W = len(a), b.shape[1], call.ctx.get_num_ranks()
        # By rank along the first dimension, each rank's columns.
        parts = gradient.reshape(M, W, N).transpose(0, 1).reshape(W * M, N)
        mine = torch.empty(M, N, device=parts.device, dtype=parts.dtype)
        call.ctx.ccl.reduce_scatter(mine, parts)
        of_a, of_b, _ = call.needs_input_grad
        return mine @ b.t() if of_a else None, a.t() @ mine if of_b else None, None
