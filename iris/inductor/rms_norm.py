"""An all_reduce, a residual added to the sum, and RMSNorm of that: `iris::all_reduce_add_rms_norm`.

Norms are found by what they compute and not by their module: torch.nn.RMSNorm and those that models write themselves
differ in where they convert and multiply.
"""

import operator
from typing import NamedTuple

import torch
from torch.fx import Graph, Node

from iris.ccl.functional import name_of_process_group
from iris.compat.inductor import c10d, value_of, writes
from iris.distributed.contexts import why_no_context
from iris.inductor import rows
from iris.inductor.fp8 import Quantised, quantised
from iris.inductor.nodes import (
    CONVERSIONS,
    DEVICE,
    ancestors,
    arguments,
    aten,
    calls,
    is_tensor,
    keeps_rows,
    known_contiguous,
    known_equal,
    only_user,
    place_of,
    users,
    wait_of,
)
from iris.inductor.operators import all_reduce_add_rms_norm, all_reduce_add_rms_norm_by_row
from iris.inductor.report import Fusion, FusionReport, where
from iris.ops.call import WIDE
from iris.ops.norm_call import MOST_COLUMNS

PATTERN, WITH_RESIDUAL = "all_reduce + RMSNorm", "all_reduce + residual + RMSNorm"


class Norm(NamedTuple):
    """``result = x / sqrt(mean(x * x) + eps) * weight``, row by row."""

    weight: Node
    eps: float
    result: Node


class ReducedSum(NamedTuple):
    """An all_reduce, and what may be normalised after it."""

    all_reduce: Node
    wait: Node
    added: Node
    """The wait, or the last of the reshapes after it: what the residual is added to."""
    residual: Node | None
    x: Node
    """What is normalised: ``added``, or its sum with the residual if there is one."""


def fuse(graph: Graph, report: FusionReport) -> None:
    """Replace each all_reduce and norm by one operator.

    With a residual the operator returns the norm and the sum with the residual. Other users of that sum, such as
    gradients, use the operator's. Without a residual the sum must have no other user.
    """
    for node in graph.find_nodes(op="call_function", target=c10d.all_reduce.default):
        total = _reduced_sum(node)
        norm = None if total is None else _norm(total.x)
        if total is None or norm is None:
            continue
        kept, fp8 = _why_not_fused(total, norm), quantised(norm.result)
        pattern = (WITH_RESIDUAL if total.residual else PATTERN) + (" + fp8" if fp8 else "")
        report.append(Fusion(pattern, kept, where(norm.result)))
        if kept is None:
            _replace(graph, total, norm, fp8)
    graph.eliminate_dead_code()


# What is there -------------------------------------------------------------------------------------------------------


def _reduced_sum(all_reduce: Node) -> ReducedSum | None:
    """An all_reduce with the residual, if one is added before anything else but reshapes is done with the sum."""
    wait = wait_of(all_reduce)
    if wait is None:
        return None
    added = wait
    while keeps_rows(following := only_user(added)):
        added = following
    add = only_user(added)
    if calls(add, aten.add.Tensor) and not add.kwargs:
        other = add.args[0] if add.args[1] is added else add.args[1]
        if other is not added and is_tensor(other) and known_equal(value_of(other).shape, value_of(added).shape):
            return ReducedSum(all_reduce, wait, added, other, add)
    return ReducedSum(all_reduce, wait, added, None, added)


def _norm(x: Node) -> Norm | None:
    """The norm of ``x``, if there is one. Followed forward: square, mean, + eps, rsqrt, * x, * weight."""
    for wide in (x, *users(x, CONVERSIONS)):
        if value_of(wide).dtype not in (torch.float32, value_of(x).dtype):
            continue
        for square in users(wide, (aten.pow.Tensor_Scalar, aten.mul.Tensor)):
            if arguments(square) not in ((wide, 2), (wide, wide)):
                continue
            for mean in users(square, aten.mean.dim):
                if _is_of_rows(mean):
                    return _norm_by(wide, mean)
    return None


def _is_of_rows(mean: Node) -> bool:
    """Whether the mean is along the last dimension, which it keeps."""
    _, dims, *keepdim = arguments(mean)
    return not mean.kwargs and keepdim == [True] and list(dims) in ([-1], [value_of(mean).dim() - 1])


def _norm_by(wide: Node, mean: Node) -> Norm | None:
    """The norm of ``wide`` by the ``mean`` of its squares."""
    for add in users(mean, (aten.add.Tensor, aten.add.Scalar)):
        for root in users(add, aten.rsqrt.default):
            for normalised in users(root, aten.mul.Tensor):
                if set(normalised.args) == {wide, root} and isinstance(add.args[1], float) and not add.kwargs:
                    return _weighted(normalised, add.args[1])
    return None


def _weighted(normalised: Node, eps: float) -> Norm | None:
    """The norm with its weight, and the conversions before and after that."""
    for each in (normalised, *users(normalised, CONVERSIONS)):
        for product in users(each, aten.mul.Tensor):
            weight = product.args[0] if product.args[1] is each else product.args[1]
            if is_tensor(weight) and known_equal(value_of(weight).shape, value_of(product).shape[-1:]):
                converted = only_user(product)
                return Norm(weight, eps, converted if calls(converted, CONVERSIONS) else product)
    return None


def _why_not_fused(total: ReducedSum, norm: Norm) -> str | None:
    """The reason for the report; None if these can be fused."""
    input, op, _ = arguments(total.all_reduce)
    tensors = [each for each in (input, norm.weight, norm.result, total.residual) if isinstance(each, Node)]
    others = [value_of(each).dtype for each in tensors if value_of(each).dtype not in WIDE]
    if op != "sum":
        return f"the reduction is {op!r}"
    if others:
        return f"there is a tensor of {others[0]}"
    if value_of(total.x).device.type != DEVICE:
        return f"it is computed on {value_of(total.x).device}"
    columns = value_of(norm.weight).shape[0]
    if not isinstance(columns, int) or columns > MOST_COLUMNS:
        return f"a row has {columns} elements, and {MOST_COLUMNS} is the most"
    if total.x in ancestors(norm.weight, total.x):
        return "the weight of the norm depends on the sum"
    if total.residual is None:
        inside = ancestors(norm.result, total.x) | {norm.result}
        # The sum itself, and the steps of the norm but for its result, which the operator does not return.
        of_sum = [each for each in inside - {norm.result} if total.x in ancestors(each, total.x) | {each}]
        if not {user for each in of_sum for user in each.users} <= inside:
            return "the sum is used elsewhere, and no residual is added to it"
    elif value_of(total.residual).dtype != value_of(total.x).dtype:
        return f"the residual is {value_of(total.residual).dtype}, and with the sum {value_of(total.x).dtype}"
    elif not known_contiguous(value_of(total.residual)):
        return "the residual is not contiguous"
    return why_no_context(arguments(total.all_reduce)[-1])


# What comes in its place ---------------------------------------------------------------------------------------------


def _replace(graph: Graph, total: ReducedSum, norm: Norm, fp8: Quantised | None) -> None:
    input, _, group = arguments(total.all_reduce)
    # The reshapes after the wait become reshapes of the operator's input.
    total.wait.replace_all_uses_with(input)
    graph.erase_node(total.wait)
    graph.erase_node(total.all_reduce)
    a = input if total.added is total.wait else total.added
    ranks, dtype = name_of_process_group(group), value_of(fp8.result if fp8 else norm.result).dtype
    if total.residual is None:
        # The operators' second result is empty: it is the sum with a residual.
        with graph.inserting_before(norm.result):
            if fp8 is None:
                given = (a, norm.weight, None, norm.eps, ranks, None, dtype)
                call = rows.call(graph, torch.ops.iris.all_reduce_rms_norm.default, *given)
                replaced = {0: norm.result}
            else:
                given_by_row = (a, norm.weight, None, norm.eps, ranks, dtype)
                call = rows.call(graph, torch.ops.iris.all_reduce_rms_norm_by_row.default, *given_by_row)
                replaced = {0: fp8.result, 2: fp8.scale}
        _use_results(graph, call, replaced)
        return
    # The operator goes where the sum is, since that may have other users. A weight that is computed, as 1 + w, may come
    # after the sum, and is moved before it then.
    needed = ancestors(norm.weight, total.x) | {norm.weight}
    for node in _between(total.x, norm.result):
        if node in needed:
            total.x.prepend(node)
    with graph.inserting_before(total.x):
        named = dict(a=a, weight=norm.weight, residual=total.residual, eps=norm.eps, ranks=ranks, dtype=dtype)
        operator_ = all_reduce_add_rms_norm_by_row if fp8 else all_reduce_add_rms_norm
        call = writes(graph, operator_, named)
    results = [fp8.result, fp8.scale] if fp8 else [norm.result]
    # `writes` returns what is written, the residual, after the operator's results.
    _use_results(graph, call, dict(enumerate([*results, total.x])))


def _between(first: Node, last: Node) -> list[Node]:
    """The nodes after ``first`` and before ``last`` in the graph's order."""
    nodes, node = [], first.next
    while node is not last:
        nodes.append(node)
        node = node.next
    return nodes


def _use_results(graph: Graph, call: Node, replaced: dict[int, Node]) -> None:
    """Let users of the ``replaced`` nodes use results of ``call``, by their numbers, instead."""
    values = call.meta.get("val", tuple(value_of(each) for each in replaced.values()))
    call.meta = {**place_of(replaced[0]), "val": values}
    for index, node in replaced.items():
        with graph.inserting_after(call):
            result = graph.call_function(operator.getitem, (call, index))
        result.meta = {**place_of(node), "val": value_of(node)}
        node.replace_all_uses_with(result)
