"""`ctx.ops.experts_mlp` as an operator of ``torch.library``, which torch.compile keeps in its graphs. No gradients.

out = experts_mlp(x, topk_ids, topk_weights, w_up, w_down, iris.experts.functional.name_of(ep))
"""

from typing import Any, cast

from torch import Tensor
from torch.library import register_autograd, register_fake

from iris.errors import InvalidExpertsError
from iris.experts.functional import find
from iris.operators.registration import operator
from iris.ops.operations import OperationsContext


@operator("experts_mlp")
def experts_mlp(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor | None, w_up: Tensor, w_down: Tensor, experts: str
) -> Tensor:
    """A layer of gated experts with SiLU: ``(T, H)`` → ``(T, H)``. Collective.

    Tensors are as `iris.ops.operations.Operations.experts_mlp` takes them, but for fp8.
    """
    ep, out = find(experts), _like(x, topk_ids, topk_weights, w_up, w_down, experts)
    cast(OperationsContext, ep._calls.context).ops.experts_mlp(out, x, topk_ids, topk_weights, w_up, w_down, experts=ep)
    return out


@register_fake(experts_mlp)
def _like(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor | None, w_up: Tensor, w_down: Tensor, experts: str
) -> Tensor:
    return x.new_empty(x.shape)


def _refuse(ctx: Any, inputs: tuple, output: Tensor) -> None:
    raise InvalidExpertsError(
        "experts_mlp() has no gradient. Call it under torch.no_grad(), or dispatch, multiply and combine by "
        "iris.experts.functional and torch's grouped products."
    )


def _no_gradient(ctx: Any, *gradients: Tensor) -> None:
    """Of what `_refuse` lets nobody keep."""


register_autograd(experts_mlp, _no_gradient, setup_context=_refuse)
