"""RMSNorm with its all-reduce as functions that return their result: a part of `iris.ops.functional`."""

from typing import Any

import torch
from torch import Tensor
from torch.library import register_autograd, register_fake

from iris.ccl import functional as collectives
from iris.errors import InvalidCollectiveError
from iris.operators.registration import operator
from iris.ops.named_ranks import context_named


@operator("all_reduce_rms_norm")
def all_reduce_rms_norm(
    a: Tensor,
    weight: Tensor,
    residual: Tensor | None,
    eps: float,
    ranks: str,
    scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """``x``, the sum of all ranks' ``a`` plus ``residual``: normalised, and as it is.

    ``a``, ``residual`` and results: ``[..., H]``; ``weight``: ``[H]``. What is given is fp16, bf16 or fp32. The first
    result has this ``dtype``, by default that of ``a``. Fp8 is saturated, and divided by ``scale``, one float32 on the
    device, if that is given. The second has the dtype of the residual; without one it is empty, ``[0]``, since no
    kernel stores the sum then: give zeros to get it.

    Raises `InvalidCollectiveError` for other shapes and dtypes, for a scale without fp8, and where a result of fp8 was
    to have a gradient; `InvalidGroupError` if ``ranks`` are not all of a context. The gradient without a residual
    forms the sum once more.
    """
    out, x = _rows_like(a, dtype), _sums_like(a, residual)
    _normalise(out, a, weight, eps, ranks, residual, x, scale=scale)
    return out, x


@operator("all_reduce_rms_norm_by_row")
def all_reduce_rms_norm_by_row(
    a: Tensor, weight: Tensor, residual: Tensor | None, eps: float, ranks: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """As `all_reduce_rms_norm`, to fp8 with a scale for each row, which is the third result: ``[..., 1]``, float32.

    It is what makes the largest of the row the largest number of ``dtype``, and what the first result has to be
    multiplied by: ``scale_a`` of the product that follows. No gradient.
    """
    out, x, row_scales = _rows_like(a, dtype), _sums_like(a, residual), _scales_like(a)
    _normalise(out, a, weight, eps, ranks, residual, x, row_scales=row_scales)
    return out, x, row_scales


def _normalise(
    out: Tensor,
    a: Tensor,
    weight: Tensor,
    eps: float,
    ranks: str,
    residual: Tensor | None,
    x: Tensor,
    **scaling: Any,
) -> None:
    """Fill ``out`` and ``x``, which is contiguous as the residual need not be."""
    adds = residual is not None
    if residual is not None:
        x.copy_(residual)
    context_named(ranks).ops.all_reduce_rms_norm(out, a, weight, eps, residual=x if adds else None, **scaling)


def _rows_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _sums_like(a: Tensor, residual: Tensor | None) -> Tensor:
    return a.new_empty(0) if residual is None else _rows_like(residual)


def _scales_like(a: Tensor) -> Tensor:
    return a.new_empty((*a.shape[:-1], 1), dtype=torch.float32)


# What they return, for torch.compile ---------------------------------------------------------------------------------


register_fake(
    all_reduce_rms_norm,
    lambda a, weight, residual, eps, ranks, scale=None, dtype=None: (_rows_like(a, dtype), _sums_like(a, residual)),
)
register_fake(
    all_reduce_rms_norm_by_row,
    lambda a, weight, residual, eps, ranks, dtype: (_rows_like(a, dtype), _sums_like(a, residual), _scales_like(a)),
)


# Gradients -----------------------------------------------------------------------------------------------------------


def _keep_rows(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    a, weight, residual, ctx.eps, ctx.ranks, _, _ = inputs
    _refuse_fp8(ctx, inputs, output)
    ctx.dtype, ctx.adds = a.dtype, residual is not None
    ctx.save_for_backward(output[1] if ctx.adds else a, weight)


def _refuse_fp8(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    if output[0].itemsize == 1:
        raise InvalidCollectiveError(
            f"Normalised rows of {output[0].dtype} have no gradient. Call it under torch.no_grad(), or normalise to "
            "fp16, bf16 or fp32."
        )


def _all_reduce_rms_norm_back(ctx: Any, of_out: Tensor, of_x: Tensor) -> tuple:
    x, weight = ctx.saved_tensors
    x, gain = (x if ctx.adds else collectives.all_reduce(x, ctx.ranks)).float(), weight.float()
    shrink = torch.rsqrt(x.square().mean(-1, keepdim=True) + ctx.eps)
    of_rows = of_out.float() * gain
    to_x = shrink * (of_rows - x * shrink.square() * (of_rows * x).mean(-1, keepdim=True))
    if ctx.adds:
        to_x = to_x + of_x.float()
    to_weight = (of_out.float() * x * shrink).reshape(-1, x.shape[-1]).sum(0)
    # A rank's input is in the sums of all ranks; its weight and residual are its own.
    to_a = collectives.all_reduce(to_x.to(ctx.dtype), ctx.ranks)
    to_residual = to_x.to(of_x.dtype) if ctx.adds else None
    return to_a, to_weight.to(weight.dtype), to_residual, None, None, None, None


def _no_gradient(ctx: Any, *gradients: Tensor) -> None:
    """Of what `_refuse_fp8` lets nobody keep."""


register_autograd(all_reduce_rms_norm, _all_reduce_rms_norm_back, setup_context=_keep_rows)
register_autograd(all_reduce_rms_norm_by_row, _no_gradient, setup_context=_refuse_fp8)
