"""The same by the vendor's GEMM and a collective, one behind the other: what a fused kernel has to beat.

It is the faster way where there is little to hide, and for what no kernel here is made for.
"""

from typing import Any

import torch

from iris.ccl.config import ReduceOp


def multiply(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> None:
    """``out = a b + bias``, in float32, rounded once."""
    if bias is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(bias, a, b, out=out)


def all_gather_matmul(ctx: Any, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> None:
    gathered = a.new_empty(ctx.num_ranks * len(a), a.shape[1])
    ctx.ccl.all_gather(gathered, a)
    multiply(out, gathered, b, bias)


def matmul_all_gather(ctx: Any, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> None:
    own = out.new_empty(len(a), b.shape[1])
    multiply(own, a, b, bias)
    ctx.ccl.all_gather(out, own)


def matmul_reduce_scatter(
    ctx: Any, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None
) -> None:
    whole = out.new_empty(len(a), b.shape[1])
    multiply(whole, a, b, None)
    ctx.ccl.reduce_scatter(out, whole, op=ReduceOp.SUM)
    if bias is not None:
        out.add_(bias)


def matmul_all_reduce(ctx: Any, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> None:
    multiply(out, a, b, None)
    ctx.ccl.all_reduce(out, out)
    if bias is not None:
        out.add_(bias)
