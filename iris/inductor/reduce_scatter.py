"""A product, and the reduce_scatter of it, by sum or mean: `iris::matmul_reduce_scatter`."""

from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from iris.ccl.functional import name_of_process_group
from iris.compat.inductor import c10d, value_of
from iris.distributed.contexts import why_no_context
from iris.inductor.joined import join, sum_of_products
from iris.inductor.nodes import DEVICE, arguments, aten, calls, depends_on_data, keeps_rows, place_of, wait_of
from iris.inductor.report import Fusion, FusionReport, where
from iris.inductor.rows import (
    Permutation,
    call,
    erase_unused,
    extents_for_view,
    permutation,
    permuted,
    rejoined,
    shaped,
    splits_and_parts,
    used_only_by,
)
from iris.ops.call import WIDE

PATTERN = "product + reduce_scatter"


class Scattered(NamedTuple):
    """The input of a reduce_scatter: ``source``, reshaped, or split and concatenated as `iris.inductor.rows` says."""

    source: Node
    passed: set[Node]
    """The nodes between ``source`` and the reduce_scatter."""
    how: Permutation | None
    """From the rows of the source to rows by ranks; None where they are by ranks."""
    extents: list[Any] | None
    """Of the result, as ``view`` takes them: numbers or nodes, one of them maybe -1; None where several are unknown."""
    by_columns: bool = False
    """Whether the last dimension is scattered."""


def fuse(graph: Graph, report: FusionReport) -> None:
    """Replace each product and reduce_scatter by one operator."""
    for node in graph.find_nodes(op="call_function", target=c10d.reduce_scatter_tensor.default):
        given = _with_one_product(graph, node, _scattered(node))
        kept = _why_not_fused(node, given)
        report.append(Fusion(PATTERN, kept, where(node)))
        if kept is None:
            _replace(graph, node, given)


def _scattered(node: Node) -> Scattered:
    """What a reduce_scatter is given, followed back to the node that computes it."""
    source, _, size, _ = arguments(node)
    passed: set[Node] = set()
    how, by_columns = None, False
    extents: list[Any] | None = extents_for_view(node)
    if extents is None and keeps_rows(source):
        # A reshape has the extents of the input among its arguments. The first is the one that is scattered.
        inner = arguments(source)[1][1:]
        extents = None if -1 in inner else [-1, *inner]
    while True:
        rearranged = rejoined(source, size) if how is None else None
        if keeps_rows(source):
            passed.add(source)
            source = arguments(source)[0]
        elif rearranged is not None and rearranged.joined == 0:
            passed |= {source, *splits_and_parts(rearranged.source)}
            shape = value_of(rearranged.source).shape
            by_columns = rearranged.split == len(shape) - 1
            share = shape[rearranged.split] // size
            inner = (share, *shape[rearranged.split + 1 : -1])
            how = permutation(shape[: rearranged.split], (size,), inner)
            source = rearranged.source
        else:
            return Scattered(source, passed, how, extents, by_columns)


def _with_one_product(graph: Graph, node: Node, given: Scattered) -> Scattered:
    """``given``; or if it is a sum of products (`iris.inductor.joined`) each of which could be fused alone, the one
    product that the graph has instead."""
    total = sum_of_products(given.source)
    if total is None:
        return given
    each_alone = [given._replace(source=each, passed=given.passed | total.passed) for each in total.products]
    if any(_why_not_fused(node, each) for each in each_alone):
        return given
    join(graph, given.source, total)
    return _scattered(node)


def _why_not_fused(node: Node, given: Scattered) -> str | None:
    """The reason for the report; None if this reduce_scatter and its product can be fused."""
    op, wait, product = arguments(node)[1], wait_of(node), given.source
    if op not in ("sum", "avg"):
        return f"the reduction is {op!r}"
    if calls(product, aten.addmm.default):
        return "each rank adds its bias to the product, before the sum"
    if not calls(product, aten.mm.default):
        what = f"the result of {product.target}" if product.op == "call_function" else "an input of the graph"
        return f"what is summed is {what} and not of a product"
    if given.by_columns:
        return "columns are scattered, and not rows"
    if not used_only_by(product, node, given.passed):
        return "the product is used elsewhere"
    if wait is None:
        return "the sum is used before it is waited for"
    dtype = value_of(product).dtype
    if dtype not in WIDE:
        return f"the product is {dtype}"
    if value_of(product).device.type != DEVICE:
        return f"it is computed on {value_of(product).device}"
    if depends_on_data(node) or depends_on_data(product):
        return "an extent of what is summed is computed from data"
    if op == "avg" and dtype == torch.float16:
        return "a sum of float16 may be too large where its mean is not"
    if given.extents is None or (given.how is not None and not given.how.is_known):
        return "the extents of several dimensions are not known before it runs"
    return why_no_context(arguments(node)[-1])


def _replace(graph: Graph, node: Node, given: Scattered) -> None:
    product, (_, op, size, group), wait = given.source, arguments(node), wait_of(node)
    assert wait is not None
    a, b = arguments(product)
    # Here and not at the product, since nodes among the extents may come after that.
    with graph.inserting_before(node):
        if given.how is not None:
            a = permuted(graph, a, given.how)
        ranks = name_of_process_group(group)
        result = call(graph, torch.ops.iris.matmul_reduce_scatter.default, a, b, None, ranks)
        if op == "avg":
            result = call(graph, aten.div.Tensor, result, size)
        assert given.extents is not None
        result = shaped(graph, result, given.extents)
    result.meta = {**place_of(wait), "val": result.meta["val"]}
    wait.replace_all_uses_with(result)
    erase_unused(graph, {product, *given.passed, node, wait})
