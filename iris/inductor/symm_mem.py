"""torch's own fused operators, `torch.ops.symm_mem.fused_*`, on Iris.

Inductor's micro-pipelining and torchtitan call them. A gather is Iris' `all_gather_matmul` of the product with the most
columns, and torch multiplies the gathered A by the other B. A scatter is a `matmul_reduce_scatter`.

Shapes, strides and dtypes of results are torch's. A may have any number of leading dimensions, ``[..., K]``. Iris
gathers and scatters rows, so the gathered or scattered dimension is moved to the front, and back in the result. If it
is the last one, A is gathered by columns, and for a scatter the product is transposed: ``(A B)^T = B^T A^T``.

What Iris does not take runs by torch's kernels as before. That depends on dtypes, options and extents that are alike on
all ranks, and on where the ranks run, so all decide alike. It does not depend on the number of columns of B, which may
differ between ranks, and be 0.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import Library

from iris import simulator
from iris.compat.c10d import group_named
from iris.compat.fused_symm_mem import by_torch, dtypes_of, replace
from iris.compat.scaled_mm import scaled_mm
from iris.distributed.contexts import context_of, why_no_context
from iris.distributed.group import ProcessGroupBase
from iris.ops.call import GATHERS_COLUMNS, GATHERS_ROWS, NARROW, WIDE, Call
from iris.ops.named_ranks import multiply


class RightOperand(NamedTuple):
    """The B of a product, and how the product is finished.

    ``b``: ``[K, N]``. ``dtype``: of the result. ``scale``: of fp8, float32, one number or ``[1, N]``. ``bias``:
    ``[N]``. ``fast``: torch's use_fast_accum, where torch multiplies.
    """

    b: Tensor
    dtype: torch.dtype
    scale: Tensor | None = None
    bias: Tensor | None = None
    fast: bool = False


def fused_all_gather_matmul(
    A: Tensor, Bs: list[Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    """The A of all ranks along ``gather_dim``, if asked for, and its products with each of ``Bs``, ``[K, N]``."""
    size = _size(group_name)
    if not Bs or why_no_context(group_name) or not all(_can_multiply(A, b, gather_dim, size, WIDE) for b in Bs):
        return _by_torch("fused_all_gather_matmul", group_name, A, Bs, gather_dim, group_name, return_A=return_A)
    gathered, results = _gather(A, [RightOperand(b, b.dtype) for b in Bs], gather_dim, group_name, keep=return_A)
    return gathered if return_A else None, results


def fused_all_gather_scaled_matmul(
    A: Tensor,
    Bs: list[Tensor],
    A_scale: Tensor,
    B_scales: list[Tensor],
    gather_dim: int,
    group_name: str,
    biases: list[Tensor | None],
    result_scales: list[Tensor | None],
    out_dtypes: list[Any],
    use_fast_accum: list[bool],
) -> tuple[Tensor, list[Tensor]]:
    """The same of fp8. ``A_scale``: one number for all of A, or one for each row of this rank's A or of all ranks'."""
    size, dtypes = _size(group_name), dtypes_of(out_dtypes)
    lengths = {len(each) for each in (Bs, B_scales, biases, result_scales, dtypes, use_fast_accum)}
    right_operands = [RightOperand(*each) for each in zip(Bs, dtypes, B_scales, biases, use_fast_accum, strict=False)]
    fits = (
        len(lengths) == 1
        and Bs
        and not why_no_context(group_name)
        and all(scale is None for scale in result_scales)
        and all(_can_multiply(A, each.b, gather_dim, size, NARROW) and _scales_fit(each) for each in right_operands)
        and gather_dim < A.dim() - 1
        and _scale_coverage(A, A_scale, gather_dim, size)
    )
    if not fits:
        return _by_torch(
            "fused_all_gather_scaled_matmul",
            group_name,
            A,
            Bs,
            A_scale,
            B_scales,
            gather_dim,
            group_name,
            biases,
            result_scales,
            out_dtypes,
            use_fast_accum,
        )
    gathered, results = _gather(A, right_operands, gather_dim, group_name, keep=True, scale=A_scale)
    assert gathered is not None
    return gathered, results


def fused_matmul_reduce_scatter(A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> Tensor:
    """This rank's part, along ``scatter_dim``, of the sum or the mean of all ranks' products."""
    if not _can_scatter(A, B, reduce_op, scatter_dim, group_name) or A.dtype not in WIDE:
        return _by_torch("fused_matmul_reduce_scatter", group_name, A, B, reduce_op, scatter_dim, group_name)
    return _scatter(A, RightOperand(B, A.dtype), reduce_op, scatter_dim, group_name)


def fused_scaled_matmul_reduce_scatter(
    A: Tensor,
    B: Tensor,
    A_scale: Tensor,
    B_scale: Tensor,
    reduce_op: str,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int,
    group_name: str,
    output_shape: list[int] | None,
    bias: Tensor | None = None,
    result_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """The same of fp8, where A may have been flattened: the product before the scatter has ``output_shape``."""
    right, shape = RightOperand(B, out_dtype or A.dtype, B_scale), list(output_shape or ())
    rows = A.flatten(0, -2) if A.dim() >= 2 else A
    whole = None
    # torch adds each rank's bias to its product, so the sum has all of them; Iris adds one.
    if bias is None and result_scale is None and shape and A.dtype in NARROW and _scales_fit(right):
        whole = _reshaped(rows, (*shape[:-1], A.shape[-1]))
    by_rows = A_scale.shape == (*A.shape[:-1], 1)
    if (
        whole is None
        or A_scale.dtype != torch.float32
        or not (A_scale.numel() == 1 or by_rows)
        or not _can_scatter(whole, B, reduce_op, orig_scatter_dim, group_name)
    ):
        return _by_torch(
            "fused_scaled_matmul_reduce_scatter",
            group_name,
            A,
            B,
            A_scale,
            B_scale,
            reduce_op,
            orig_scatter_dim,
            scatter_dim_after_maybe_reshape,
            group_name,
            output_shape,
            bias,
            result_scale,
            out_dtype,
            use_fast_accum,
        )
    scale = A_scale if A_scale.numel() == 1 else A_scale.reshape(*whole.shape[:-1], 1)
    return _scatter(whole, right, reduce_op, orig_scatter_dim, group_name, scale)


KERNELS = {
    each.__name__: each
    for each in (
        fused_all_gather_matmul,
        fused_all_gather_scaled_matmul,
        fused_matmul_reduce_scatter,
        fused_scaled_matmul_reduce_scatter,
    )
}


def put_in_place() -> list[Library]:
    """Let these carry torch's operators, on GPUs and in the simulator, as long as the result lasts. Local."""
    return [replace(KERNELS, key) for key in ("CUDA", *(["CPU"] if simulator.ACTIVE else []))]


# What Iris takes -----------------------------------------------------------------------------------------------------


def _size(group_name: str) -> int:
    return group_named(group_name).size()


def _can_multiply(a: Tensor, b: Tensor, gather_dim: int, size: int, dtypes: tuple[torch.dtype, ...]) -> bool:
    """Whether A, gathered along ``gather_dim``, can be multiplied by B."""
    if a.dim() < 2 or b.dim() != 2 or not 0 <= gather_dim < a.dim():
        return False
    depth = a.shape[-1] * (size if gather_dim == a.dim() - 1 else 1)
    return b.shape[0] == depth and a.dtype == b.dtype and a.dtype in dtypes


def _scales_fit(right: RightOperand) -> bool:
    """Whether `ctx.ops` takes the scale of B, one number or one for each column, and the result's dtype and bias."""
    scale, bias = right.scale, right.bias
    if right.dtype not in WIDE or right.b.dim() != 2 or scale is None or scale.dtype != torch.float32:
        return False
    return (scale.numel() == 1 or scale.shape == (1, right.b.shape[1])) and (bias is None or bias.dtype in WIDE)


def _scale_coverage(a: Tensor, scale: Tensor, gather_dim: int, size: int) -> str | None:
    """What has a scale each: "rows of a rank", "all rows" of the gathered A, or "all" of A together; None: neither.

    In the order in which torch asks, which matters where there is one row.
    """
    if scale.dtype != torch.float32:
        return None
    if scale.shape == (*a.shape[:-1], 1):
        return "rows of a rank"
    if scale.numel() == 1:
        return "all"
    whole = list(a.shape[:-1])
    whole[gather_dim] *= size
    return "all rows" if scale.shape == (*whole, 1) else None


def _can_scatter(a: Tensor, b: Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> bool:
    """Whether Iris can scatter the product along this dimension, and its ranks can have a context."""
    if a.dim() < 2 or b.dim() != 2 or not 0 <= scatter_dim < a.dim() or reduce_op not in ("sum", "avg"):
        return False
    shared = b.shape[1] if scatter_dim == a.dim() - 1 else a.shape[scatter_dim]
    fits = a.shape[-1] == b.shape[0] and a.dtype == b.dtype
    return fits and b.shape[1] > 0 and shared % _size(group_name) == 0 and not why_no_context(group_name)


def _reshaped(rows: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """The rows in another shape, if that has as many elements."""
    return rows.reshape(shape) if math.prod(shape) == rows.numel() else None


def _by_torch(name: str, group_name: str, a: Tensor, *args: Any, **options: Any) -> Any:
    """The operator by torch's kernels.

    torch's symmetric memory knows no groups of Iris' backend, so there it is a product and a collective in turn.
    """
    in_steps = a.device.type != "cuda" or isinstance(group_named(group_name), ProcessGroupBase)
    return by_torch(name, in_steps, a, *args, **options)


# How Iris runs it ----------------------------------------------------------------------------------------------------


def _gather(
    a: Tensor, right_operands: list[RightOperand], dim: int, group_name: str, keep: bool, scale: Tensor | None = None
) -> tuple[Tensor | None, list[Tensor]]:
    """The gathered A, if it is kept or has several products, and the products."""
    context = context_of(group_named(group_name))
    size, by_columns = context.num_ranks, dim == a.dim() - 1
    moved = a if by_columns else a.movedim(dim, 0)
    shard, leading = moved.flatten(0, -2), list(moved.shape[:-1])
    rows, depth = shard.shape
    if by_columns:
        depth *= size
    else:
        rows, leading[0] = rows * size, leading[0] * size
    if scale is not None:
        scale = _scales_of_all_ranks(context, scale, a, dim)
    gathered = shard.new_empty(rows, depth) if keep or len(right_operands) > 1 else None
    # The largest product hides most of the transfer.
    largest = max(right_operands, key=lambda each: each.b.shape[1])
    fused = shard.new_empty(rows, largest.b.shape[1], dtype=largest.dtype)
    name = GATHERS_COLUMNS if by_columns else GATHERS_ROWS
    call = Call(
        name,
        out=fused,
        a=shard,
        b=largest.b,
        bias=largest.bias,
        scale_a=scale,
        scale_b=largest.scale,
        gathered=gathered,
    )
    multiply(context, call)
    results = [fused if each is largest else _multiply(gathered, each, scale) for each in right_operands]

    def with_dims_of_a(result: Tensor) -> Tensor:
        whole = result.view(*leading, result.shape[1])
        return whole if by_columns else whole.movedim(0, dim)

    kept = None if gathered is None else with_dims_of_a(gathered)
    if kept is not None and size == 1:
        kept = kept.contiguous()  # as torch's is, which concatenates nothing then
    return kept, [with_dims_of_a(each) for each in results]


def _multiply(gathered: Tensor | None, right: RightOperand, scale: Tensor | None) -> Tensor:
    """A further product with the gathered A, by torch."""
    assert gathered is not None
    if scale is None:
        return torch.mm(gathered, right.b)
    scale = scale if scale.numel() == 1 else scale.reshape(-1, 1)
    return scaled_mm(
        gathered,
        right.b,
        scale,
        right.scale,
        bias=right.bias,
        out_dtype=right.dtype,
        use_fast_accum=right.fast,
    )


def _scales_of_all_ranks(context: Any, scale: Tensor, a: Tensor, dim: int) -> Tensor:
    """The scales of the gathered A: one for each row, in the order in which rows are gathered; or ``[1]`` for all."""
    kind = _scale_coverage(a, scale, dim, context.num_ranks)
    if kind == "all":
        return scale.reshape(1)
    rows = scale.movedim(dim, 0).reshape(-1)
    if kind == "all rows":
        return rows
    of_all = rows.new_empty(context.num_ranks * len(rows))
    context.ccl.all_gather(of_all, rows)
    return of_all


def _scatter(
    a: Tensor, right: RightOperand, reduce_op: str, dim: int, group_name: str, scale: Tensor | None = None
) -> Tensor:
    """This rank's part of the sum of products."""
    context = context_of(group_named(group_name))
    size, columns = context.num_ranks, right.b.shape[1]
    # A sum of float16 may overflow where the mean does not.
    sum_in_float32 = reduce_op == "avg" and right.dtype == torch.float16
    dtype = torch.float32 if sum_in_float32 else right.dtype
    by_columns = dim == a.dim() - 1
    moved = a if by_columns else a.movedim(dim, 0)
    shape, rows = list(moved.shape[:-1]), moved.flatten(0, -2)
    if scale is not None and scale.numel() > 1:
        scale = (scale if by_columns else scale.movedim(dim, 0)).reshape(-1)
    if by_columns:
        result = rows.new_empty(len(rows), columns // size, dtype=dtype)
        # The columns of the product are the rows of its transpose.
        turned = result.t(), right.b.t(), rows.t()
        call = Call("matmul_reduce_scatter", *turned, bias=None, scale_a=right.scale, scale_b=scale)
    else:
        result = rows.new_empty(len(rows) // size, columns, dtype=dtype)
        shape[0] //= size
        call = Call("matmul_reduce_scatter", result, rows, right.b, bias=None, scale_a=scale, scale_b=right.scale)
    multiply(context, call)
    if reduce_op == "avg":
        result = result.div_(size).to(right.dtype)
    whole = result.view(*shape, result.shape[1])
    return whole if by_columns else whole.movedim(0, dim).contiguous()
