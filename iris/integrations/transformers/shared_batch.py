"""Where the ranks of a tensor parallel group hold the same batch: each takes a share of its tokens, and they gather.

Shares lie by rank and are equal, but for the last tokens, of which a rank may have fewer, or none. What the ranks have
in common, they have the same gradients of. So the gradient of taking a share is a gather, and that of a gather is
taking a share.
"""

from typing import Any

import torch
from torch.nn.functional import pad

from iris.ccl import functional as collectives


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, rank: int, size: int, ranks: str) -> torch.Tensor:
        ctx.size, ctx.tokens, ctx.ranks = size, whole.shape[0], ranks
        return own_rows(whole, rank, size).clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:  # type: ignore[override]
        return gathered(gradient, ctx.size, ctx.tokens, ctx.ranks), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: torch.Tensor, rank: int, size: int, tokens: int, ranks: str) -> torch.Tensor:
        ctx.rank, ctx.size = rank, size
        return gathered(share, size, tokens, ranks)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:  # type: ignore[override]
        return own_rows(gradient, ctx.rank, ctx.size).contiguous(), None, None, None, None


def share_size(tokens: int, size: int) -> int:
    """Rows of a share of ``size`` ranks; at least one, so that there is always something to gather."""
    return max(1, -(-tokens // size))


def own_rows(whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    rows = share_size(whole.shape[0], size)
    return whole[rank * rows : (rank + 1) * rows]


def gathered(share: torch.Tensor, size: int, tokens: int, ranks: str) -> torch.Tensor:
    missing = share_size(tokens, size) - share.shape[0]
    return collectives.all_gather(pad(share, (0, 0, 0, missing)) if missing else share.contiguous(), ranks)[:tokens]


def take_share(whole: torch.Tensor, rank: int, size: int, ranks: str) -> torch.Tensor:
    """This rank's rows of ``[T, ...]``. Local, but for its gradient, which is collective."""
    if torch.is_grad_enabled() and whole.requires_grad:
        return _Take.apply(whole, rank, size, ranks)
    return own_rows(whole, rank, size)


def gather_shares(share: torch.Tensor, rank: int, size: int, tokens: int, ranks: str) -> torch.Tensor:
    """``[T, ...]`` of what each of ``size`` ranks has made of its share. Collective, and its gradient is local."""
    return _Gather.apply(share, rank, size, tokens, ranks)
