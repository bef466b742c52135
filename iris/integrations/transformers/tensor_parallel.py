"""Tensor parallel styles in which a product and the sum over ranks are one operation, ``iris::matmul_all_reduce``.

| style | forward | backward |
| --- | --- | --- |
| `FusedRowwiseParallel` | product and sum of the partial results | products |
| `FusedColwiseParallel` | product | product and sum of the partial gradients |

Activations between such layers are the same on all ranks, and so are their gradients: the sum's is each rank's own.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.functional import linear
from transformers.distributed.tensor_parallel import ColwiseParallel, RowwiseParallel

from iris.errors import InvalidCollectiveError
from iris.integrations.transformers.groups import Ranks
from iris.ops.functional import matmul_all_reduce


class _Rowwise(torch.autograd.Function):
    """``(M, K / W)``, ``(N, K / W)``, ``(N)`` → ``(M, N)``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, ranks: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        return matmul_all_reduce(x, weight.t(), bias, ranks)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:  # type: ignore[override]
        return *gradients(ctx, gradient, lambda weight: gradient @ weight), None


class _Colwise(torch.autograd.Function):
    """``(M, K)``, ``(N / W, K)``, ``(N / W)`` → ``(M, N / W)``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, ranks: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.ranks = ranks
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:  # type: ignore[override]
        # Each rank has other columns of the result, so the input's gradient is a sum over ranks.
        to_x = lambda weight: matmul_all_reduce(gradient.contiguous(), weight, None, ctx.ranks)  # noqa: E731
        return *gradients(ctx, gradient, to_x), None


def gradients(ctx: Any, gradient: Tensor, to_x: Callable[[Tensor], Tensor]) -> tuple[Tensor | None, ...]:
    """Of input, weight and bias, those that are wanted; ``to_x`` makes the first of them of the weight."""
    x, weight = ctx.saved_tensors
    return (
        to_x(weight) if ctx.needs_input_grad[0] else None,
        gradient.t() @ x if ctx.needs_input_grad[1] else None,
        gradient.sum(0) if ctx.needs_input_grad[2] else None,
    )


class FusedRowwiseParallel(RowwiseParallel):
    """``"rowwise"``, of ``torch.nn.Linear`` whose input features divide by the number of ranks."""

    def install_forward(self, module: Any, mesh: Any) -> Any:
        check(module, mesh, "iris_rowwise", "in_features")
        return install(module, mesh, _Rowwise, Shard(-1), sums=True)


class FusedColwiseParallel(ColwiseParallel):
    """``"colwise"``, of ``torch.nn.Linear`` whose output features divide by the number of ranks."""

    def install_forward(self, module: Any, mesh: Any) -> Any:
        check(module, mesh, "iris_colwise", "out_features")
        return install(module, mesh, _Colwise, Replicate(), sums=False)


def check(module: Any, mesh: Any, style: str, features: str) -> None:
    """Raise unless the style is for this module."""
    plain = {"iris_rowwise": "rowwise", "iris_colwise": "colwise"}[style]
    # Its subclasses may be quantized.
    if type(module) is not torch.nn.Linear:
        raise InvalidCollectiveError(
            f'"{style}" is for torch.nn.Linear itself, and the plan gives it to {type(module).__name__}. Give that '
            f'"{plain}".'
        )
    if getattr(module, features) % mesh.size():
        raise InvalidCollectiveError(
            f'"{style}" is for {features} that {mesh.size()} ranks can share evenly, and {module} has '
            f'{getattr(module, features)}. Give that "{plain}".'
        )


def install(module: Any, mesh: Any, function: Any, placement: Any, sums: bool) -> Any:
    """Replace the module's forward. ``sums``: whether ranks add up in forward, and not in backward alone."""
    ranks = Ranks(mesh.get_group())

    def forward(input: Tensor) -> Tensor:
        if isinstance(input, DTensor):
            input = input.redistribute(placements=[placement]).to_local()
        given = [to_local(each) for each in (input.reshape(-1, input.shape[-1]), module.weight, module.bias)]
        x, weight, bias = as_under_autocast(given)
        if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in given):
            out = function.apply(x, weight, bias, ranks.name(x.device))
        elif sums:
            out = matmul_all_reduce(x, weight.t(), bias, ranks.name(x.device))
        else:
            out = linear(x, weight, bias)
        return out.view(*input.shape[:-1], out.shape[-1])

    module.forward = forward
    return module


def to_local(tensor: Tensor | None) -> Tensor | None:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_under_autocast(tensors: list[Tensor | None]) -> list[Any]:
    """As torch's linear would take them: inside an `autograd.Function` autocast would change them unseen."""
    kind = next(each.device.type for each in tensors if each is not None)
    if not torch.is_autocast_enabled(kind):
        return tensors
    narrow = torch.get_autocast_dtype(kind)
    return [None if each is None else each.to(narrow) for each in tensors]
