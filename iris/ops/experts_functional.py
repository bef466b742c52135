"""`experts_mlp` as a function that returns its result: an operator of ``torch.library``, with gradients.

It names the experts by a string, as the operators of `iris.experts.functional` do:

    experts = iris.experts.functional.name_of(ep)
    out = iris.ops.functional.experts_mlp(x, topk_ids, topk_weights, w_up, w_down, experts)

The gradient brings the tokens to their experts once more, and computes the activation again: what a dispatch brings
lies in memory that the next one uses, and is several times as large as the tokens. With R rows of this rank's experts,
a row's token's gradient g, its weight w, and a = act(h), h = x w_up^T:

    d                    g w_down                [R, I]   a grouped GEMM
    of h                 w d act'(h)             [R, 2 I] one pass over rows, which has w a and a . d besides
    of w_down            sum of g^T (w a)        [H, I]   a product for each expert, over its rows
    of w_up              sum of h'^T x           [2 I, H] likewise
    of x                 h' w_up                 [R, H]   a grouped GEMM, and a combine
    of w                 a . d                            which is g . (a w_down^T), what the expert has made of the row

So it has two dispatches and one combine, three grouped GEMMs, and two that add up rows. Every rank calls backward.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.library import register_autograd, register_fake

from iris.errors import InvalidExpertsError
from iris.experts import functional as exchange
from iris.experts.choices import first_choices, numbers_of_choices, sums_of_rows
from iris.operators.registration import operator
from iris.ops.call import NARROW
from iris.ops.experts_mlp import LAYOUT, NAME
from iris.ops.grouped.activation_gradient import differentiate_activation
from iris.ops.grouped.call import GroupedCall
from iris.ops.grouped.launch import enqueue
from iris.ops.grouped.sums import sums_of_groups
from iris.ops.operations import OperationsContext


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
@torch.no_grad()
def _backward(
    of_out: Tensor,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    experts: str,
    trains: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, ``topk_weights``, ``w_up`` and ``w_down``, but empty where there are no weights, or where
    those of the experts have none: ``trains``."""
    given = torch.ones_like(topk_ids, dtype=torch.float32) if topk_weights is None else topk_weights
    calls = exchange.calls_of(experts)
    # Products read rows of no expert only where padding is, which has to be zeros for their sums.
    make = x.new_empty if calls.config.alignment == 1 else x.new_zeros
    of_rows, rows = (make(calls.rows_shape(LAYOUT)) for _ in range(2))
    received = calls.dispatch(of_out, topk_ids, given, layout=LAYOUT, rows=of_rows)
    with exchange.others_wait(calls, f"the gradient of {NAME}"):
        places, of_choices = calls.choices(received)
        factors = sums_of_rows(of_choices, places, len(rows))
        received.release()
        # The combine needs this dispatch's choices, and ends it.
        received = calls.dispatch(x, topk_ids, None, layout=LAYOUT, rows=rows)
        offs, counts = received.offsets[1:], received.counts
        hidden, to_down = _multiply(rows, w_up.transpose(1, 2), offs, counts), _multiply(of_rows, w_down, offs, counts)
        value, of_hidden, of_factors = differentiate_activation(hidden, to_down, factors, offs=offs, counts=counts)
        of_up, of_down = x.new_empty(0), x.new_empty(0)
        if trains:
            of_up = sums_of_groups(of_hidden, rows, received.offsets)
            of_down = sums_of_groups(of_rows, value, received.offsets)
        to_x = _multiply(of_hidden, w_up, offs, counts)
        of_x = calls.combine(to_x, received, first_choices(topk_ids))
        of_weights = x.new_empty(0, dtype=torch.float32)
        if topk_weights is not None:
            # Each rank's part is of that rank's tokens. An expert is on one rank: a sum adds nothing to it but zeros.
            here = numbers_of_choices(of_factors, places)
            back = here.new_empty(here.shape[1:])
            calls.context.ccl.reduce_scatter(back, here, group=calls.group)
            of_weights = back[: len(topk_ids)]
    return of_x, of_weights, of_up, of_down


def _multiply(rows: Tensor, matrices: Tensor, offs: Tensor, counts: Tensor) -> Tensor:
    """`iris.ops.grouped_mm` of what the forward pass has checked."""
    out = rows.new_empty(rows.shape[0], matrices.shape[2])
    enqueue(GroupedCall(out, rows, matrices, offs, counts), None)
    return out


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
    trains: Any,
) -> Any:
    weights = x.new_empty(0 if topk_weights is None else topk_weights.shape, dtype=torch.float32)
    return x.new_empty(x.shape), weights, *(x.new_empty(w.shape if trains else 0) for w in (w_up, w_down))


# The matrices' places among the operator's arguments.
UP, DOWN = 3, 4


def _keep(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, topk_ids, topk_weights, w_up, w_down, ctx.experts, *_ = inputs
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
        trains,
    )
    of_matrices = (of_up, of_down) if trains else (None, None)
    return of_x, None, of_weights if ctx.weighted else None, *of_matrices, *(None,) * 6


register_autograd(experts_mlp, _back, setup_context=_keep)
