"""A layer whose weights are split among the ranks, of the library's fused operations and their gradients."""

import torch

import iris
from iris.ccl.functional import name_of
from iris.ops import functional


class TensorParallelMLP(torch.nn.Module):
    """``gelu(X W1) W2``, where each rank has its rows of X and of the result, its columns of W1 and its rows of W2.

    Every rank calls it, and backward, with equally many rows. Both are enqueued on the current stream, and can be
    captured after a first call. The module does not keep ``ctx`` alive.

    Attributes
    ----------
    w1, w2 : torch.nn.Parameter
        ``[hidden, wide / W]`` and ``[wide / W, hidden]``, not initialised.
    """

    def __init__(self, ctx: iris.Iris, hidden: int, wide: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.ranks = name_of(ctx)
        W = ctx.get_num_ranks()
        if wide % W:
            raise ValueError(f"A width of {wide} cannot be dealt out evenly to {W} ranks. Give a multiple of {W}.")
        mine = wide // W
        self.w1 = torch.nn.Parameter(torch.empty(hidden, mine, device=ctx.device, dtype=dtype))
        self.w2 = torch.nn.Parameter(torch.empty(mine, hidden, device=ctx.device, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's ``[T / W, hidden]`` of the result, of its ``[T / W, hidden]`` of X."""
        inside = functional.all_gather_matmul(x, self.w1, None, self.ranks)
        return functional.matmul_reduce_scatter(torch.nn.functional.gelu(inside), self.w2, None, self.ranks)
