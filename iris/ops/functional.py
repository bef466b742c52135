"""The fused operations as functions that return their result: operators of ``torch.library``, with gradients.

They name their ranks by a string, as those of `iris.ccl.functional` do:

    ranks = iris.ccl.functional.name_of(ctx)
    y = functional.all_gather_matmul(x, weight, None, ranks)     # also torch.ops.iris.all_gather_matmul

Gradients are fused operations too: what gathers in one direction scatters sums in the other. Every rank calls backward.

Under ``torch.autocast`` a product is one of its dtype, as ``torch.nn.functional.linear`` is: of matrices that are not
fp8, and with a bias in the dtype of the result.

``scale_a``, ``scale_b``: as `iris.ops.operations.Operations` takes them; ``dtype``: of the result, if not that of the
matrices, or bf16 where they are fp8. Fp8 and scales have no gradient: neither products of them, nor results.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import register_autograd, register_fake

from iris.ccl import functional as collectives
from iris.ccl.functional import find, size_of
from iris.errors import InvalidCollectiveError, InvalidGroupError
from iris.operators.registration import LIBRARY, operator
from iris.ops.call import WIDE
from iris.ops.experts_functional import experts_mlp as experts_mlp
from iris.ops.operations import OperationsContext


def _context(ranks: str) -> OperationsContext:
    """Whose ranks they are: all of a context's, since the fused operations are among these."""
    context, group = find(ranks)
    if group not in (None, dist.group.WORLD):
        raise InvalidGroupError(
            "The fused operations are among all ranks of a context, and this is the name of a group. Take "
            "iris.ccl.functional.name_of(ctx)."
        )
    return cast(OperationsContext, context)


# Rows of the result, by those of A and the number of ranks.
ROWS = {
    "all_gather_matmul": lambda M, W: M * W,
    "all_gather_matmul_k": lambda M, W: M,
    "matmul_all_gather": lambda M, W: M * W,
    "matmul_reduce_scatter": lambda M, W: M // W,
    "matmul_all_reduce": lambda M, W: M,
}


def _out(name: str, a: Tensor, b: Tensor, size: int, dtype: torch.dtype | None) -> Tensor:
    if not a.dim() == b.dim() == 2:
        raise InvalidCollectiveError(
            f"{name}() with A {list(a.shape)} and B {list(b.shape)}: they are matrices, with two dimensions."
        )
    # The shape and not the length, which torch.compile would take for a constant.
    rows = ROWS[name](a.shape[0], size)
    return a.new_empty(rows, b.shape[1], dtype=dtype or (torch.bfloat16 if a.itemsize == 1 else a.dtype))


@operator("all_gather_matmul")
def all_gather_matmul(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    ranks: str,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The rows of all ranks' ``a``, times ``b``: ``(M / W, K)``, ``(K, N)`` → ``(M, N)``."""
    context = _context(ranks)
    out = _out("all_gather_matmul", a, b, context.num_ranks, dtype)
    context.ops.all_gather_matmul(out, a, b, bias, scale_a=scale_a, scale_b=scale_b)
    return out


@operator("all_gather_matmul_k")
def all_gather_matmul_k(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    ranks: str,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The columns of all ranks' ``a``, times ``b``: ``(M, K / W)``, ``(K, N)`` → ``(M, N)``."""
    context = _context(ranks)
    out = _out("all_gather_matmul_k", a, b, context.num_ranks, dtype)
    context.ops.all_gather_matmul(out, a, b, bias, gather_dim="k", scale_a=scale_a, scale_b=scale_b)
    return out


@operator("matmul_all_gather")
def matmul_all_gather(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    ranks: str,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The rows of every rank's ``a b``: ``(M, K)``, ``(K, N)`` → ``(W * M, N)``."""
    context = _context(ranks)
    out = _out("matmul_all_gather", a, b, context.num_ranks, dtype)
    context.ops.matmul_all_gather(out, a, b, bias, scale_a=scale_a, scale_b=scale_b)
    return out


@operator("matmul_reduce_scatter")
def matmul_reduce_scatter(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    ranks: str,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """This rank's rows of the sum of all ranks' ``a b``: ``(M, K)``, ``(K, N)`` → ``(M / W, N)``."""
    context = _context(ranks)
    out = _out("matmul_reduce_scatter", a, b, context.num_ranks, dtype)
    context.ops.matmul_reduce_scatter(out, a, b, bias, scale_a=scale_a, scale_b=scale_b)
    return out


@operator("matmul_all_reduce")
def matmul_all_reduce(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    ranks: str,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The sum of all ranks' ``a b``: ``(M, K)``, ``(K, N)`` → ``(M, N)``."""
    context = _context(ranks)
    out = _out("matmul_all_reduce", a, b, context.num_ranks, dtype)
    context.ops.matmul_all_reduce(out, a, b, bias, scale_a=scale_a, scale_b=scale_b)
    return out


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
    multiplied by: ``scale_a`` of the product behind. No gradient.
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
    _context(ranks).ops.all_reduce_rms_norm(out, a, weight, eps, residual=x if adds else None, **scaling)


def _rows_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _sums_like(a: Tensor, residual: Tensor | None) -> Tensor:
    return a.new_empty(0) if residual is None else _rows_like(residual)


def _scales_like(a: Tensor) -> Tensor:
    return a.new_empty((*a.shape[:-1], 1), dtype=torch.float32)


# What they return, for torch.compile ---------------------------------------------------------------------------------


def _fake(name: str) -> Callable[..., Tensor]:
    def result(
        a: Any, b: Any, bias: Any, ranks: Any, scale_a: Any = None, scale_b: Any = None, dtype: Any = None
    ) -> Any:
        return _out(name, a, b, size_of(ranks), dtype)

    return result


register_fake(all_gather_matmul, _fake("all_gather_matmul"))
register_fake(all_gather_matmul_k, _fake("all_gather_matmul_k"))
register_fake(matmul_all_gather, _fake("matmul_all_gather"))
register_fake(matmul_reduce_scatter, _fake("matmul_reduce_scatter"))
register_fake(matmul_all_reduce, _fake("matmul_all_reduce"))
register_fake(
    all_reduce_rms_norm,
    lambda a, weight, residual, eps, ranks, scale=None, dtype=None: (_rows_like(a, dtype), _sums_like(a, residual)),
)
register_fake(
    all_reduce_rms_norm_by_row,
    lambda a, weight, residual, eps, ranks, dtype: (_rows_like(a, dtype), _sums_like(a, residual), _scales_like(a)),
)


# Under torch.autocast ------------------------------------------------------------------------------------------------


def _autocast(name: str, device_type: str) -> Callable[..., Tensor]:
    """What torch calls in the operator's place where autocast is on. The gradients are of what was given."""
    product = getattr(torch.ops.iris, name).default

    def call(a: Any, b: Any, bias: Any, ranks: Any, scale_a: Any = None, scale_b: Any = None, dtype: Any = None) -> Any:
        narrow = torch.get_autocast_dtype(device_type)
        if a.dtype in WIDE and b.dtype in WIDE:
            a, b = a.to(narrow), b.to(narrow)
            bias = None if bias is None else bias.to(dtype or narrow)
        with torch.autocast(device_type, enabled=False):
            return product(a, b, bias, ranks, scale_a, scale_b, dtype)

    return call


for _name in ROWS:
    for _device_type in ("cpu", "cuda"):
        LIBRARY.impl(_name, _autocast(_name, _device_type), f"Autocast{_device_type.upper()}")


# Gradients -----------------------------------------------------------------------------------------------------------


# The operands' places among an operator's arguments.
A, B, BIAS = range(3)


def _keep(ctx: Any, inputs: tuple, output: Tensor) -> None:
    a, b, bias, ctx.ranks, scale_a, scale_b, _ = inputs
    if a.itemsize == 1 or scale_a is not None or scale_b is not None:
        raise InvalidCollectiveError(
            f"A product of {a.dtype} {'without' if scale_a is scale_b is None else 'with'} scales has no gradient. "
            "Call it under torch.no_grad(), or give it fp16, bf16 or fp32, and no scales."
        )
    ctx.save_for_backward(a, b)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _saved(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A, B, and the gradient in their dtype, which a bias' gradient is not rounded to."""
    a, b = ctx.saved_tensors
    return a, b, gradient.to(a.dtype)


def _bias(ctx: Any, gradient: Tensor) -> Tensor | None:
    """Of a bias that was added to each row that ``gradient`` has here."""
    return gradient.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if ctx.needs_input_grad[BIAS] else None


def _product(ctx: Any, operand: int, x: Tensor, y: Tensor) -> Tensor | None:
    """The gradient of an operand, if it is to have one, which no other rank notices; collectives are called anyway."""
    return torch.mm(x, y) if ctx.needs_input_grad[operand] else None


def _all_gather_matmul_back(ctx: Any, gradient: Tensor) -> tuple:
    a, b, rounded = _saved(ctx, gradient)
    # Each rank multiplied all rows, so a row's gradient is a sum over the ranks, of which its owner gets all.
    to_a = matmul_reduce_scatter(rounded, b.t(), None, ctx.ranks)
    to_b = _product(ctx, B, collectives.all_gather(a, ctx.ranks).t(), rounded)
    return to_a, to_b, _bias(ctx, gradient), None, None, None, None


def _all_gather_matmul_k_back(ctx: Any, gradient: Tensor) -> tuple:
    a, b, rounded = _saved(ctx, gradient)
    # As above with all that is transposed: the rows that ranks share are those of A's transpose.
    to_a = matmul_reduce_scatter(b, rounded.t(), None, ctx.ranks).t()
    to_b = _product(ctx, B, collectives.all_gather(a.t().contiguous(), ctx.ranks), rounded)
    return to_a, to_b, _bias(ctx, gradient), None, None, None, None


def _matmul_all_gather_back(ctx: Any, gradient: Tensor) -> tuple:
    # Of these rows, from all ranks: added up in the result's dtype, which may be wider than that of the matrices.
    own = collectives.reduce_scatter(gradient, ctx.ranks)
    a, b, rounded = _saved(ctx, own)
    to_a, to_b = _product(ctx, A, rounded, b.t()), _product(ctx, B, a.t(), rounded)
    return to_a, to_b, _bias(ctx, own), None, None, None, None


def _matmul_reduce_scatter_back(ctx: Any, gradient: Tensor) -> tuple:
    a, b, rounded = _saved(ctx, gradient)
    to_a = all_gather_matmul(rounded, b.t(), None, ctx.ranks)
    to_b = _product(ctx, B, a.t(), collectives.all_gather(rounded, ctx.ranks))
    return to_a, to_b, _bias(ctx, gradient), None, None, None, None


def _matmul_all_reduce_back(ctx: Any, gradient: Tensor) -> tuple:
    a, b, rounded = _saved(ctx, gradient)
    total = collectives.all_reduce(rounded, ctx.ranks)
    to_a, to_b = _product(ctx, A, total, b.t()), _product(ctx, B, a.t(), total)
    return to_a, to_b, _bias(ctx, gradient), None, None, None, None


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


register_autograd(all_gather_matmul, _all_gather_matmul_back, setup_context=_keep)
register_autograd(all_gather_matmul_k, _all_gather_matmul_k_back, setup_context=_keep)
register_autograd(matmul_all_gather, _matmul_all_gather_back, setup_context=_keep)
register_autograd(matmul_reduce_scatter, _matmul_reduce_scatter_back, setup_context=_keep)
register_autograd(matmul_all_reduce, _matmul_all_reduce_back, setup_context=_keep)
register_autograd(all_reduce_rms_norm, _all_reduce_rms_norm_back, setup_context=_keep_rows)
register_autograd(all_reduce_rms_norm_by_row, _no_gradient, setup_context=_refuse_fp8)
