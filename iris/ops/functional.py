"""The fused operations as functions that return their result: operators of ``torch.library``, with gradients.

They name their ranks by a string, as those of `iris.ccl.functional` do:

    ranks = iris.ccl.functional.name_of(ctx)
    y = functional.all_gather_matmul(x, weight, None, ranks)     # also torch.ops.iris.all_gather_matmul

Products are fused where all ranks' ``b`` have one shape. A rank compares its own with the others' on the host at the
first call where it is new there; where they differ, product and collective come one after the other. So a weight that
is split unevenly must not have, on some rank, the shape of one that was split evenly before: that rank would not come
to compare, and the others would wait for it. Give the weight that is split unevenly first, or pad it.

Gradients are fused operations too: what gathers in one direction scatters sums in the other. Every rank calls backward.

Under ``torch.autocast`` a product is one of its dtype, as ``torch.nn.functional.linear`` is: of matrices that are not
fp8, and with a bias in the dtype of the result.

``scale_a``, ``scale_b``: as `iris.ops.operations.Operations` takes them; ``dtype``: of the result, if not that of the
matrices, or bf16 where they are fp8. Fp8 and scales have no gradient: neither products of them, nor results.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import register_autograd, register_fake

from iris.ccl import functional as collectives
from iris.ccl.functional import size_of
from iris.errors import InvalidCollectiveError
from iris.operators.registration import LIBRARY, operator
from iris.ops.call import WIDE, Call
from iris.ops.experts_functional import experts_mlp as experts_mlp
from iris.ops.named_ranks import context_named, multiply
from iris.ops.norm_operators import all_reduce_rms_norm as all_reduce_rms_norm
from iris.ops.norm_operators import all_reduce_rms_norm_by_row as all_reduce_rms_norm_by_row

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


def _out_and_a(name: str, a: Tensor, b: Tensor, size: int, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    return _out(name, a, b, size, dtype), a.new_empty(ROWS[name](a.shape[0], size), a.shape[1])


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
    context = context_named(ranks)
    out = _out("all_gather_matmul", a, b, context.num_ranks, dtype)
    multiply(context, Call("all_gather_matmul", out, a, b, bias, scale_a, scale_b))
    return out


@operator("all_gather_matmul_return_a")
def all_gather_matmul_return_a(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    ranks: str,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """As `all_gather_matmul`, and the rows of all ranks' ``a``: ``(M / W, K)``, ``(K, N)`` → ``(M, N)``, ``(M, K)``.

    For what else is made of these rows, such as other products with them. Backward gathers them no more. On all ranks
    the second result has a gradient, or on none.
    """
    context = context_named(ranks)
    out, gathered = _out_and_a("all_gather_matmul", a, b, context.num_ranks, dtype)
    multiply(context, Call("all_gather_matmul", out, a, b, bias, scale_a, scale_b, gathered))
    return out, gathered


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
    context = context_named(ranks)
    out = _out("all_gather_matmul_k", a, b, context.num_ranks, dtype)
    multiply(context, Call("all_gather_matmul_k", out, a, b, bias, scale_a, scale_b))
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
    context = context_named(ranks)
    out = _out("matmul_all_gather", a, b, context.num_ranks, dtype)
    multiply(context, Call("matmul_all_gather", out, a, b, bias, scale_a, scale_b))
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
    context = context_named(ranks)
    out = _out("matmul_reduce_scatter", a, b, context.num_ranks, dtype)
    multiply(context, Call("matmul_reduce_scatter", out, a, b, bias, scale_a, scale_b))
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
    context = context_named(ranks)
    out = _out("matmul_all_reduce", a, b, context.num_ranks, dtype)
    multiply(context, Call("matmul_all_reduce", out, a, b, bias, scale_a, scale_b))
    return out


# What they return, for torch.compile ---------------------------------------------------------------------------------


def _fake(name: str) -> Callable[..., Tensor]:
    def result(
        a: Any, b: Any, bias: Any, ranks: Any, scale_a: Any = None, scale_b: Any = None, dtype: Any = None
    ) -> Any:
        return _out(name, a, b, size_of(ranks), dtype)

    return result


register_fake(all_gather_matmul, _fake("all_gather_matmul"))
register_fake(
    all_gather_matmul_return_a,
    lambda a, b, bias, ranks, scale_a=None, scale_b=None, dtype=None: _out_and_a(
        "all_gather_matmul", a, b, size_of(ranks), dtype
    ),
)
register_fake(all_gather_matmul_k, _fake("all_gather_matmul_k"))
register_fake(matmul_all_gather, _fake("matmul_all_gather"))
register_fake(matmul_reduce_scatter, _fake("matmul_reduce_scatter"))
register_fake(matmul_all_reduce, _fake("matmul_all_reduce"))


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


for _name in (*ROWS, "all_gather_matmul_return_a"):
    for _device_type in ("cpu", "cuda"):
        LIBRARY.impl(_name, _autocast(_name, _device_type), f"Autocast{_device_type.upper()}")


# Gradients -----------------------------------------------------------------------------------------------------------


# The operands' places among an operator's arguments.
A, B, BIAS = range(3)


def _keep(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _keep_operands(ctx, inputs, inputs[A])


def _keep_gathered(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    _keep_operands(ctx, inputs, output[1])
    # No gradient of the rows is None, and not zeros, for which no sum has to be formed.
    ctx.set_materialize_grads(False)


def _keep_operands(ctx: Any, inputs: tuple, left: Tensor) -> None:
    """``left``: that one which is multiplied by B, for B's gradient."""
    a, b, bias, ctx.ranks, scale_a, scale_b, _ = inputs
    if a.itemsize == 1 or scale_a is not None or scale_b is not None:
        raise InvalidCollectiveError(
            f"A product of {a.dtype} {'without' if scale_a is scale_b is None else 'with'} scales has no gradient. "
            "Call it under torch.no_grad(), or give it fp16, bf16 or fp32, and no scales."
        )
    ctx.save_for_backward(left, b)
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


def _all_gather_matmul_return_a_back(ctx: Any, of_out: Tensor | None, of_rows: Tensor | None) -> tuple:
    gathered, b = ctx.saved_tensors
    if of_out is None:
        to_rows = torch.zeros_like(gathered) if of_rows is None else of_rows
        return collectives.reduce_scatter(to_rows, ctx.ranks), None, None, None, None, None, None
    rounded = of_out.to(gathered.dtype)
    if of_rows is None:
        to_a = matmul_reduce_scatter(rounded, b.t(), None, ctx.ranks)
    else:
        # A row's gradient is a sum over the ranks of what each has used it for: one sum for both.
        to_a = collectives.reduce_scatter(torch.addmm(of_rows, rounded, b.t()), ctx.ranks)
    return to_a, _product(ctx, B, gathered.t(), rounded), _bias(ctx, of_out), None, None, None, None


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


register_autograd(all_gather_matmul, _all_gather_matmul_back, setup_context=_keep)
register_autograd(all_gather_matmul_return_a, _all_gather_matmul_return_a_back, setup_context=_keep_gathered)
register_autograd(all_gather_matmul_k, _all_gather_matmul_k_back, setup_context=_keep)
register_autograd(matmul_all_gather, _matmul_all_gather_back, setup_context=_keep)
register_autograd(matmul_reduce_scatter, _matmul_reduce_scatter_back, setup_context=_keep)
register_autograd(matmul_all_reduce, _matmul_all_reduce_back, setup_context=_keep)
