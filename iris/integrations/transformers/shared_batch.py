"""Where the ranks of a tensor parallel group hold the same batch: each takes a share of its tokens, and they gather.

What they share, they have the same gradients of. So the gradient of taking a share is a gather, and that of the gather
is taking a share.
"""

from typing import Any

import torch
from torch.nn.functional import pad

from iris.ccl import functional as collectives


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, rank: int, rows: int, ranks: str) -> torch.Tensor:
        ctx.ranks = ranks
        return whole[rank * rows : (rank + 1) * rows].clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:  # type: ignore[override]
        return collectives.all_gather(gradient.contiguous(), ctx.ranks), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: torch.Tensor, rank: int, ranks: str) -> torch.Tensor:
        ctx.rank, ctx.rows = rank, share.shape[0]
        return collectives.all_gather(share.contiguous(), ranks)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:  # type: ignore[override]
        return gradient[ctx.rank * ctx.rows : (ctx.rank + 1) * ctx.rows].contiguous(), None, None


def share_size(tokens: int, size: int) -> int:
    """Rows of a share, of as many on each of ``size`` ranks: at least one, so that ranks always gather something."""
    return max(1, -(-tokens // size))


def take_share(whole: torch.Tensor, rank: int, size: int, ranks: str, fill: int = 0) -> torch.Tensor:
    """This rank's rows of ``[T, ...]``; behind the last of all, rows of ``fill``. Local; its gradient is collective."""
    rows = share_size(whole.shape[0], size)
    return _Take.apply(pad(whole, (0, 0, 0, rows * size - whole.shape[0]), value=fill), rank, rows, ranks)


def gather_shares(share: torch.Tensor, rank: int, tokens: int, ranks: str) -> torch.Tensor:
    """``[T, ...]`` of what each rank has made of its share. Collective."""
    return _Gather.apply(share, rank, ranks)[:tokens]
