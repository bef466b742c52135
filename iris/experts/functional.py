"""dispatch and combine as functions that return their result: operators of ``torch.library``, with gradients.

They name the experts by a string, since a graph of torch.compile holds no objects:

    experts = functional.name_of(ep)                         # of what ctx.experts() has made
    rows, counts, offsets = functional.dispatch(x, topk_ids, experts)
    out = functional.combine(y, topk_ids, topk_weights, experts)

For training: results are tensors of their own, and a combine needs nothing of a dispatch but the same choices. So it
sends these once more, 8 K bytes a token, and each call takes one of `ExpertsConfig.in_flight` for as long as it lasts.
What inference does without copies, `ExpertParallel` has.

The gradient of a dispatch is a combine, and that of a combine a dispatch: every rank calls backward. Weights get
theirs, too: the product of a token's gradient with what the expert has made of it, which goes back to the token's rank.
Rows that no token has are zeros, and so are their gradients.
"""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.library import register_autograd, register_fake

from iris.ccl import functional as collectives
from iris.errors import InvalidExpertsError, short_repr
from iris.experts.calls import Calls
from iris.experts.checks import check_given
from iris.experts.choices import sums_of_rows
from iris.experts.expert_parallel import ExpertParallel
from iris.operators.graph_break import breaks_graph
from iris.operators.registration import operator

_named: "dict[str, weakref.ref[ExpertParallel]]" = {}


def name_of(experts: ExpertParallel) -> str:
    """The name of these experts, always the same. Local.

    It does not keep them alive. In a function for torch.compile the first call breaks the graph.
    """
    for name, named in _named.items():
        if named() is experts:
            return name
    return _new_name(experts)


@breaks_graph("the first call of name_of() for these experts is in a compiled function; make it before")
def _new_name(experts: ExpertParallel) -> str:
    if not isinstance(experts, ExpertParallel):
        raise InvalidExpertsError(f"name_of() takes what ctx.experts() has made, and got {short_repr(experts)}.")
    name = f"iris.experts.{len(_named)}"
    _named[name] = weakref.ref(experts)
    return name


def find(name: str) -> ExpertParallel:
    experts = _named[name]() if name in _named else None
    if experts is None:
        raise InvalidExpertsError(
            f"No experts have the name {name!r}: take it from iris.experts.functional.name_of(ep), and keep ep."
        )
    return experts


def check_name(name: object) -> None:
    """That it is a name, and not the experts: an operator of torch would say of these that they are no str."""
    if not isinstance(name, str):
        raise InvalidExpertsError(
            f"experts={short_repr(name)} is not possible: it is a name, iris.experts.functional.name_of(ep), since a "
            "graph of torch.compile holds no objects."
        )


def calls_of(name: str) -> Calls:
    """What the operators work with."""
    return find(name)._calls


def dispatch(x: Tensor, topk_ids: Tensor, experts: str, layout: str = "compact") -> tuple[Tensor, Tensor, Tensor]:
    """`ExpertParallel.dispatch`: ``(T, H)``, ``(T, K)`` → rows, counts and offsets, as `Received` has them.

    Collective. x is of the dtype of the experts. Rows have a gradient.
    """
    check_name(experts)
    rows, counts, offsets, _, _ = _dispatch(x, topk_ids, None, experts, layout)
    return rows, counts, offsets


def combine(y: Tensor, topk_ids: Tensor, topk_weights: Tensor | None, experts: str, layout: str = "compact") -> Tensor:
    """`ExpertParallel.combine`: rows of the layout, ``(T, K)``, ``(T, K)`` → ``(T, H)``.

    Collective. ``topk_ids`` and ``layout``: those of the dispatch. Without weights rows are added as they are.
    """
    check_name(experts)
    return _combine(y, topk_ids, topk_weights, experts, layout)


@operator("experts_dispatch")
def _dispatch(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor | None, experts: str, layout: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows, counts, offsets; and for gradients places, which row each choice of each rank is, and weights of rows.

    Places: int32 ``[ranks, max_tokens, top_k]``, -1 for what is not here. Weights: float32, one a row, the sum of those
    of a token's choices of the expert; empty without ``topk_weights``.
    """
    calls = calls_of(experts)
    rows = x.new_zeros(calls.rows_shape(layout))
    received = calls.dispatch(x, topk_ids, topk_weights, layout=layout, rows=rows.flatten(0, -2))
    with others_wait(calls, "dispatch()"):
        places, of_choices = calls.choices(received)
        weights = x.new_empty(0, dtype=torch.float32)
        if topk_weights is not None:
            weights = sums_of_rows(of_choices, places, rows.shape[:-1].numel())
        counts, offsets = received.counts.clone(), received.offsets.clone()
        received.release()
    return rows, counts, offsets, places, weights


@contextlib.contextmanager
def others_wait(calls: Calls, call: str) -> Iterator[None]:
    """Between the parts of a call, where the other ranks wait for this one's next part: an error breaks the group."""
    try:
        yield
    except BaseException as error:
        calls.broken_by(call, error)
        raise


@operator("experts_combine")
def _combine(y: Tensor, topk_ids: Tensor, topk_weights: Tensor | None, experts: str, layout: str) -> Tensor:
    calls = calls_of(experts)
    # All of it is checked before the choices are sent, since the other ranks wait for what comes after these.
    check_given("combine", "y", y, calls.limits.device, calls.rows_shape(layout), (calls.dtype,))
    received = calls.route(topk_ids, topk_weights, layout)
    with others_wait(calls, "combine()"):
        return calls.combine(y, received)


@register_fake(_dispatch)
def _like_dispatch(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor | None, experts: str, layout: str
) -> tuple[Tensor, ...]:
    calls = calls_of(experts)
    shape, extents = calls.rows_shape(layout), calls.extents
    weights = 0 if topk_weights is None else torch.Size(shape[:-1]).numel()
    return (
        x.new_empty(shape),
        x.new_empty(extents.LOCAL, dtype=torch.int32),
        x.new_empty(extents.LOCAL + 1, dtype=torch.int32),
        x.new_empty(calls.choices_shape, dtype=torch.int32),
        x.new_empty(weights, dtype=torch.float32),
    )


@register_fake(_combine)
def _like_combine(y: Tensor, topk_ids: Tensor, topk_weights: Tensor | None, experts: str, layout: str) -> Tensor:
    return y.new_empty(topk_ids.shape[0], find(experts).hidden)


# Gradients -----------------------------------------------------------------------------------------------------------


def _keep_choices(ctx: Any, inputs: tuple, output: tuple) -> None:
    _, topk_ids, _, ctx.experts, ctx.layout = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(topk_ids)


def _dispatch_back(ctx: Any, of_rows: Tensor, *others: Any) -> tuple:
    (topk_ids,) = ctx.saved_tensors
    of_x = _combine(of_rows.contiguous(), topk_ids, first_choices(topk_ids), ctx.experts, ctx.layout)
    return of_x, None, None, None, None


def first_choices(topk_ids: Tensor) -> Tensor:
    """float32 weights by which each row of a token counts once: it has one of an expert, however often it chose it."""
    same = topk_ids[:, :, None] == topk_ids[:, None, :]
    return (~torch.tril(same, diagonal=-1).any(dim=-1)).float()


def _keep_rows(ctx: Any, inputs: tuple, output: Tensor) -> None:
    y, topk_ids, topk_weights, ctx.experts, ctx.layout = inputs
    ctx.weighted = topk_weights is not None
    ctx.save_for_backward(y, topk_ids, *((topk_weights,) if ctx.weighted else ()))


def _combine_back(ctx: Any, of_out: Tensor) -> tuple:
    y, topk_ids, *given = ctx.saved_tensors
    weights = given[0] if given else torch.ones_like(topk_ids, dtype=torch.float32)
    rows, _, _, places, of_rows = _dispatch(of_out.contiguous(), topk_ids, weights, ctx.experts, ctx.layout)
    to_y = scaled(rows, of_rows.view(rows.shape[:-1]))
    if not ctx.weighted:
        return to_y, None, None, None, None
    return to_y, None, to_choices(products(y, rows).flatten(), places, topk_ids.shape[0], ctx.experts), None, None


def products(left: Tensor, right: Tensor) -> Tensor:
    """The scalar product of each row with the other's, float32. Terms are rounded to bf16, not to fp16: too narrow."""
    wide = left.float() if left.dtype == torch.float16 else left
    return (wide * right).sum(dim=-1, dtype=torch.float32)


def scaled(rows: Tensor, factors: Tensor) -> Tensor:
    """Rows times a float32 factor each, rounded once, to their dtype; in one pass, if nobody wants its gradients."""
    if torch.is_grad_enabled():
        return (rows * factors[..., None]).to(rows.dtype)
    return torch.mul(rows, factors[..., None], out=torch.empty_like(rows))


def to_choices(of_rows: Tensor, places: Tensor, tokens: int, experts: str) -> Tensor:
    """Numbers of rows, float32 ``[rows]``, to the choices that these are of, on the tokens' ranks: ``[tokens, K]``."""
    calls = calls_of(experts)
    here = torch.where(places >= 0, of_rows[places.clamp(min=0).long()], 0.0)
    # Of each rank's tokens to that rank; an expert is on one, so the sum over ranks adds nothing to it but zeros.
    back = collectives.all_to_all(here.flatten(), collectives.name_of(calls.context, calls.group))
    return back.view_as(here).sum(dim=0)[:tokens]


register_autograd(_dispatch, _dispatch_back, setup_context=_keep_choices)
register_autograd(_combine, _combine_back, setup_context=_keep_rows)
