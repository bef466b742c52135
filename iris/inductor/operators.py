"""Operators for compiled graphs alone: they overwrite ``residual``, which Inductor copies first if it is read later."""

from typing import cast

import torch
from torch import Tensor
from torch.library import register_fake

from iris.ccl.functional import find
from iris.operators.registration import operator
from iris.ops.call import overlap
from iris.ops.operations import OperationsContext


@operator("all_reduce_add_rms_norm", writes=("residual",))
def all_reduce_add_rms_norm(
    a: Tensor, weight: Tensor, residual: Tensor, eps: float, ranks: str, dtype: torch.dtype
) -> Tensor:
    """As `iris.ops.functional.all_reduce_rms_norm`, but the sum with the residual is left in ``residual``.

    ``a``, ``residual``: ``[..., N]``, the latter contiguous. ``weight``: ``[N]``. ``ranks``: the group's name. The
    result is ``[..., N]`` of ``dtype``.
    """
    out = torch.empty_like(a, dtype=dtype, memory_format=torch.contiguous_format)
    context, (a, weight) = cast(OperationsContext, find(ranks)[0]), _apart(a, weight, residual)
    context.ops.all_reduce_rms_norm(out, a, weight, eps, residual=residual)
    return out


@operator("all_reduce_add_rms_norm_by_row", writes=("residual",))
def all_reduce_add_rms_norm_by_row(
    a: Tensor, weight: Tensor, residual: Tensor, eps: float, ranks: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The same to fp8, and a scale for each row: float32 ``[..., 1]``."""
    out, scales = _rows_and_scales(a, dtype)
    context, (a, weight) = cast(OperationsContext, find(ranks)[0]), _apart(a, weight, residual)
    context.ops.all_reduce_rms_norm(out, a, weight, eps, residual=residual, row_scales=scales)
    return out, scales


def _apart(a: Tensor, weight: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Copies of what lies across the residual, which is written over: in a graph both may be parts of one tensor.

    ``a`` may be the residual itself, which is read and written row by row.
    """
    memory = residual.untyped_storage().data_ptr()
    # Nearly always neither; `overlap` costs the host microseconds.
    if a.untyped_storage().data_ptr() == memory and overlap(a, residual):
        is_itself = (a.data_ptr(), a.dtype) == (residual.data_ptr(), residual.dtype)
        a = a if is_itself else a.clone()
    if weight.untyped_storage().data_ptr() == memory and overlap(weight, residual):
        weight = weight.clone()
    return a, weight


def _rows_and_scales(a: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows = torch.empty_like(a, dtype=dtype, memory_format=torch.contiguous_format)
    return rows, a.new_empty((*a.shape[:-1], 1), dtype=torch.float32)


register_fake(
    all_reduce_add_rms_norm,
    lambda a, weight, residual, eps, ranks, dtype: torch.empty_like(
        a, dtype=dtype, memory_format=torch.contiguous_format
    ),
)
register_fake(all_reduce_add_rms_norm_by_row, lambda a, weight, residual, eps, ranks, dtype: _rows_and_scales(a, dtype))
