"""`experts_mlp` as a function that returns its result: an operator of ``torch.library``, with gradients.

It names the experts by a string, as the operators of `iris.experts.functional` do:

    experts = iris.experts.functional.name_of(ep)
    out = iris.ops.functional.experts_mlp(x, topk_ids, topk_weights, w_up, w_down, experts)

The gradient brings the tokens to their experts once more, and computes the activation again: what a dispatch brings
lies in memory that the next one uses, and is several times as large as the tokens. With R rows of this rank's experts,
a row's token's gradient g, its weight w, and a = act(h), h = x w_up^T:

    of the activation    w g w_down              [R, I]   a grouped GEMM
    of w_down            sum of (w g)^T a        [H, I]   a product for each expert, over its rows
    of h, of w_up        act'(h), sum of h'^T x  [2 I, H] likewise
    of x                 h' w_up                 [R, H]   a grouped GEMM, and a combine
    of w                 a . (g w_down)                   which is g . (a w_down^T), what the expert has made of the row

So it has two dispatches and one combine, three grouped GEMMs, and two that add up rows, by torch. Every rank calls
backward.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.library import register_autograd, register_fake
from torch.nn.functional import silu

from iris.errors import InvalidExpertsError
from iris.experts import functional as exchange
from iris.operators.registration import operator
from iris.ops.call import NARROW
from iris.ops.experts_mlp import LAYOUT
from iris.ops.grouped.launch import grouped_mm
from iris.ops.operations import OperationsContext

# Bytes that torch's grouped GEMM wants rows to be a multiple of.
TORCH_ROW = 16


@operator("experts_mlp")
def experts_mlp(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    experts: str,
    activation: str | None = "silu_and_mul",
    x_scales: Tensor | None = None,
    scale_up: Tensor | None = None,
    scale_down: Tensor | None = None,
    overlap: bool | None = None,
) -> Tensor:
    """`Operations.experts_mlp`, whose arguments these are, but for ``experts``, a name; returns ``out``.

    x, ``topk_weights``, ``w_up`` and ``w_down`` have gradients; fp8 has none.
    """
    ep = exchange.find(experts)
    out = x.new_empty(x.shape[0], ep.hidden, dtype=ep.dtype)
    cast(OperationsContext, ep._calls.context).ops.experts_mlp(
        out,
        x,
        topk_ids,
        topk_weights,
        w_up,
        w_down,
        activation,
        experts=ep,
        x_scales=x_scales,
        scale_up=scale_up,
        scale_down=scale_down,
        overlap=overlap,
    )
    return out


@operator("experts_mlp_backward")
def _backward(
    of_out: Tensor,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    experts: str,
    activation: str | None,
    trains: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, ``topk_weights``, ``w_up`` and ``w_down``, but empty where there are no weights, or where
    those of the experts have none: ``trains``."""
    given = torch.ones_like(topk_ids, dtype=torch.float32) if topk_weights is None else topk_weights
    rows, counts, offsets, _, _ = exchange._dispatch(x, topk_ids, None, experts, LAYOUT)
    of_rows, _, _, places, factors = exchange._dispatch(of_out, topk_ids, given, experts, LAYOUT)
    groups = {"offs": offsets[1:], "counts": counts}

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        # Rows that no token has are to be zeros, as those of a dispatch: sums over rows read them.
        return grouped_mm(a, b, **groups, out=a.new_zeros(a.shape[0], b.shape[2]))

    hidden = multiply(rows, w_up.transpose(1, 2))
    to_down = multiply(of_rows, w_down)
    value, of_hidden = activate(hidden, exchange.scaled(to_down, factors), activation)
    of_x = exchange._combine(multiply(of_hidden, w_up), topk_ids, exchange.first_choices(topk_ids), experts, LAYOUT)
    of_weights, of_up, of_down = x.new_empty(0, dtype=torch.float32), x.new_empty(0), x.new_empty(0)
    if topk_weights is not None:
        of_weights = exchange.to_choices(exchange.products(value, to_down), places, len(topk_ids), experts)
    if trains:
        of_down = sums_of_groups(exchange.scaled(of_rows, factors), value, offsets)
        of_up = sums_of_groups(of_hidden, rows, offsets)
    return of_x, of_weights, of_up, of_down


def activate(hidden: Tensor, of_value: Tensor, activation: str | None) -> tuple[Tensor, Tensor]:
    """The activation's value, and the gradient of what it is of, from that of its value.

    Each step rounds to the dtype of the rows, as torch's own backward does: rows are many, and wider ones take several
    times as long.
    """
    if activation is None:
        return hidden, of_value
    of_hidden = torch.empty_like(hidden)
    (gate, up), (of_gate, of_up) = hidden.chunk(2, dim=1), of_hidden.chunk(2, dim=1)
    value = silu(gate)
    torch.mul(of_value, value, out=of_up)
    torch.ops.aten.silu_backward.grad_input(of_value * up, gate, grad_input=of_gate)
    return value.mul_(up), of_hidden


def sums_of_groups(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """``left[rows of g]^T right[rows of g]`` for each group g: ``[R, M]``, ``[R, N]`` -> ``[E, M, N]``."""
    multiply = getattr(torch.nn.functional, "grouped_mm", None)  # from torch 2.10 on
    if multiply is not None and not any(each.shape[1] * each.itemsize % TORCH_ROW for each in (left, right)):
        made = multiply(left.t(), right, offs=offsets[1:])
        # What it makes of no rows is undefined.
        return torch.where((offsets.diff() > 0)[:, None, None], made, 0)
    ends = offsets.tolist()
    return torch.stack([left[begin:end].t() @ right[begin:end] for begin, end in zip(ends, ends[1:], strict=False)])


@register_fake(experts_mlp)
def _like(
    x: Any,
    topk_ids: Any,
    topk_weights: Any,
    w_up: Any,
    w_down: Any,
    experts: Any,
    activation: Any = None,
    x_scales: Any = None,
    scale_up: Any = None,
    scale_down: Any = None,
    overlap: Any = None,
) -> Any:
    ep = exchange.find(experts)
    return x.new_empty(x.shape[0], ep.hidden, dtype=ep.dtype)


@register_fake(_backward)
def _like_backward(
    of_out: Any,
    x: Any,
    topk_ids: Any,
    topk_weights: Any,
    w_up: Any,
    w_down: Any,
    experts: Any,
    activation: Any,
    trains: Any,
) -> Any:
    weights = x.new_empty(0 if topk_weights is None else topk_weights.shape, dtype=torch.float32)
    return x.new_empty(x.shape), weights, *(x.new_empty(w.shape if trains else 0) for w in (w_up, w_down))


# The matrices' places among the operator's arguments.
UP, DOWN = 3, 4


def _keep(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, topk_ids, topk_weights, w_up, w_down, ctx.experts, ctx.activation, *_ = inputs
    if w_up.dtype in NARROW:
        raise InvalidExpertsError(
            f"experts_mlp() with weights of {w_up.dtype} has no gradient. Call it under torch.no_grad(), or give it "
            "fp16, bf16 or fp32."
        )
    ctx.weighted = topk_weights is not None
    ctx.save_for_backward(x, topk_ids, w_up, w_down, *((topk_weights,) if ctx.weighted else ()))


def _back(ctx: Any, of_out: Tensor) -> tuple:
    x, topk_ids, w_up, w_down, *given = ctx.saved_tensors
    trains = ctx.needs_input_grad[UP] or ctx.needs_input_grad[DOWN]
    of_x, of_weights, of_up, of_down = _backward(
        of_out.contiguous(),
        x,
        topk_ids,
        given[0] if given else None,
        w_up,
        w_down,
        ctx.experts,
        ctx.activation,
        trains,
    )
    of_matrices = (of_up, of_down) if trains else (None, None)
    return of_x, None, of_weights if ctx.weighted else None, *of_matrices, *(None,) * 6


register_autograd(experts_mlp, _back, setup_context=_keep)
