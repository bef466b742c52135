"""The collectives as functions that return their result: operators of ``torch.library``, which torch.compile keeps.

They name their ranks by a string, since a graph holds no objects:

    ranks = functional.name_of(ctx)
    total = functional.all_reduce(x, ranks)              # also torch.ops.iris.all_reduce

or by `name_of_process_group`, which needs no context: one is made when an operator first runs.

Collective, and enqueued on the current stream like those of `ctx.ccl`. Gradients are collectives too: every rank of the
group calls backward. Operations are "sum", "avg", "min", "max" and "product", or those members of `ReduceOp` or
``torch.distributed.ReduceOp``; the first two have gradients.
"""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import register_autograd, register_fake

from iris.ccl.config import ReduceOp
from iris.ccl.protocols import CollectivesContext
from iris.ccl.reduction import name_of as name_of_reduction
from iris.compat.c10d import group_named
from iris.errors import InvalidCollectiveError, InvalidGroupError, UnsupportedReductionError, short_repr
from iris.operators.graph_break import breaks_graph
from iris.operators.registration import operator
from iris.world import check_process_group

Op = str | ReduceOp | dist.ReduceOp.RedOpType


class Ranks(NamedTuple):
    """What a name stands for."""

    context: weakref.ref[CollectivesContext]
    group: dist.ProcessGroup | None


_named: dict[str, Ranks] = {}

# What names of process groups of torch.distributed begin with here.
_PROCESS_GROUP = "process_group:"
_makers: list[Callable[[dist.ProcessGroup], CollectivesContext]] = []


def make_contexts_with(context_of: Callable[[dist.ProcessGroup], CollectivesContext]) -> None:
    """Set what returns the context of all ranks of a process group, making it if there is none yet."""
    _makers[:] = [context_of]


def name_of_process_group(name: str) -> str:
    """The name for these operators of the ranks of the process group that torch.distributed calls ``name``. Local."""
    return _PROCESS_GROUP + name


def _process_group(name: str) -> dist.ProcessGroup | None:
    """The group that has this name for the operators, if it is one of torch.distributed's."""
    return group_named(name.removeprefix(_PROCESS_GROUP)) if name.startswith(_PROCESS_GROUP) else None


def name_of(ctx: CollectivesContext, group: dist.ProcessGroup | None = None) -> str:
    """The name of the ranks of ``group`` (default: all) that use ``ctx``; the same for equal arguments. Local.

    It does not keep the context alive. In a function for torch.compile the first call breaks the graph.
    """
    for name, ranks in _named.items():
        if ranks.context() is ctx and ranks.group is group:
            return name
    return _new_name(ctx, group)


@breaks_graph("the first call of name_of() for these ranks is in a compiled function; make it before")
def _new_name(ctx: CollectivesContext, group: dist.ProcessGroup | None) -> str:
    if not hasattr(ctx, "ccl"):
        raise InvalidGroupError(f"name_of() takes a context, as iris.iris() makes one, and got {short_repr(ctx)}.")
    if group is not None:
        check_process_group(group)
    name = f"iris.{len(_named)}"
    _named[name] = Ranks(weakref.ref(ctx), group)
    return name


def find(name: str) -> tuple[CollectivesContext, dist.ProcessGroup | None]:
    process_group = _process_group(name)
    if process_group is not None:
        return _makers[0](process_group), None
    ranks = _named.get(name)
    context = None if ranks is None else ranks.context()
    if ranks is None or context is None:
        raise InvalidGroupError(
            f"No context has the name {name!r}: take it from iris.ccl.functional.name_of(ctx), and keep the context."
        )
    return context, ranks.group


def size_of(name: str) -> int:
    process_group = _process_group(name)
    if process_group is not None:
        return process_group.size()
    context, group = find(name)
    return context.num_ranks if group is None else group.size()


def _rows(name: str, input: Tensor) -> int:
    if input.dim() == 0:
        raise InvalidCollectiveError(f"{name}() takes rows, and the input has no dimension: give it x.reshape(1).")
    return input.shape[0]


def _like(input: Tensor, rows: int | None = None) -> Tensor:
    """A contiguous tensor of the shape of ``input``, or with so many ``rows``."""
    return input.new_empty(input.shape if rows is None else (rows, *input.shape[1:]))


def all_reduce(input: Tensor, ranks: str, op: Op = "sum") -> Tensor:
    """Every rank's ``input`` combined, on every rank."""
    return _all_reduce(input, ranks, name_of_reduction(op))


@operator("all_reduce")
def _all_reduce(input: Tensor, ranks: str, op: str = "sum") -> Tensor:
    context, group = find(ranks)
    output = _like(input)
    context.ccl.all_reduce(output, input, op=ReduceOp(op), group=group)
    return output


@operator("all_gather")
def all_gather(input: Tensor, ranks: str) -> Tensor:
    """Every rank's ``input``, by rank along the first dimension: ``(M, ...)`` → ``(W * M, ...)``."""
    context, group = find(ranks)
    output = _like(input, _rows("all_gather", input) * size_of(ranks))
    context.ccl.all_gather(output, input, group=group)
    return output


def reduce_scatter(input: Tensor, ranks: str, op: Op = "sum") -> Tensor:
    """The rank's part of the ranks' combined ``input``: ``(W * M, ...)`` → ``(M, ...)``."""
    return _reduce_scatter(input, ranks, name_of_reduction(op))


@operator("reduce_scatter")
def _reduce_scatter(input: Tensor, ranks: str, op: str = "sum") -> Tensor:
    context, group = find(ranks)
    rows, size = _rows("reduce_scatter", input), size_of(ranks)
    if rows % size:
        raise InvalidCollectiveError(
            f"reduce_scatter() among {size} ranks takes an input whose number of rows is a multiple of {size}; it got "
            f"{list(input.shape)}."
        )
    output = _like(input, rows // size)
    context.ccl.reduce_scatter(output, input, op=ReduceOp(op), group=group)
    return output


@operator("all_to_all")
def all_to_all(input: Tensor, ranks: str) -> Tensor:
    """Chunk r of the columns goes to rank r: ``(M, N * W)`` → ``(M, N * W)``."""
    context, group = find(ranks)
    output = _like(input)
    context.ccl.all_to_all(output, input, group=group)
    return output


@operator("broadcast")
def broadcast(input: Tensor, ranks: str, src: int = 0) -> Tensor:
    """``input`` of rank ``src`` (its rank in the world), on every rank."""
    context, group = find(ranks)
    output = input.clone(memory_format=torch.contiguous_format)
    context.ccl.broadcast(output, src, group=group)
    return output


def reduce(input: Tensor, ranks: str, dst: int = 0, op: Op = "sum") -> Tensor:
    """Every rank's ``input`` combined, on rank ``dst`` (its rank in the world); zeros on the others."""
    return _reduce(input, ranks, dst, name_of_reduction(op))


@operator("reduce")
def _reduce(input: Tensor, ranks: str, dst: int = 0, op: str = "sum") -> Tensor:
    context, group = find(ranks)
    output = torch.zeros_like(input, memory_format=torch.contiguous_format)
    context.ccl.reduce(output, input, dst, op=ReduceOp(op), group=group)
    return output


# What they return, for torch.compile ---------------------------------------------------------------------------------

register_fake(_all_reduce, lambda input, ranks, op="sum": _like(input))
register_fake(all_gather, lambda input, ranks: _like(input, _rows("all_gather", input) * size_of(ranks)))
register_fake(
    _reduce_scatter, lambda input, ranks, op="sum": _like(input, _rows("reduce_scatter", input) // size_of(ranks))
)
register_fake(all_to_all, lambda input, ranks: _like(input))
register_fake(broadcast, lambda input, ranks, src=0: _like(input))
register_fake(_reduce, lambda input, ranks, dst=0, op="sum": _like(input))


# Gradients -----------------------------------------------------------------------------------------------------------


def _keep_arguments(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.arguments = inputs[1:]


def _linear(op: str) -> str:
    if op not in ("sum", "avg"):
        raise UnsupportedReductionError(f"There is no gradient of op={short_repr(op)}: of 'sum' and 'avg' there is.")
    return op


def _scatter_back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    ranks, op = ctx.arguments
    gathered = all_gather(gradient, ranks)
    return gathered / size_of(ranks) if _linear(op) == "avg" else gathered, None, None


def _reduce_back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    ranks, dst, op = ctx.arguments
    sent = broadcast(gradient, ranks, dst)
    return sent / size_of(ranks) if _linear(op) == "avg" else sent, None, None, None


register_autograd(
    _all_reduce,
    lambda ctx, gradient: (all_reduce(gradient, ctx.arguments[0], _linear(ctx.arguments[1])), None, None),
    setup_context=_keep_arguments,
)
register_autograd(
    all_gather, lambda ctx, gradient: (reduce_scatter(gradient, *ctx.arguments), None), setup_context=_keep_arguments
)
register_autograd(_reduce_scatter, _scatter_back, setup_context=_keep_arguments)
register_autograd(
    all_to_all, lambda ctx, gradient: (all_to_all(gradient, *ctx.arguments), None), setup_context=_keep_arguments
)
# The same call on all ranks, though one alone has a gradient: a compiler would drop a call that only gives zeros.
register_autograd(
    broadcast, lambda ctx, gradient: (reduce(gradient, *ctx.arguments), None, None), setup_context=_keep_arguments
)
register_autograd(_reduce, _reduce_back, setup_context=_keep_arguments)
