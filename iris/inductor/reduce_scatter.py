"""A product, and each rank's part of the sum or the mean of all ranks' products: `iris::matmul_reduce_scatter`."""

from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from iris.ccl.functional import name_of_process_group
from iris.compat.inductor import c10d, value_of
from iris.distributed.contexts import why_no_context
from iris.inductor.joined import join, sum_of_products
from iris.inductor.nodes import DEVICE, arguments, aten, calls, depends_on_data, place_of, reshaped_rows, waited
from iris.inductor.report import Fusion, FusionReport, where
from iris.inductor.rows import (
    Blocks,
    between,
    blocks,
    call,
    erase_unused,
    known_extents,
    rejoined,
    shaped,
    swapped,
    used_only_by,
)
from iris.ops.call import WIDE

PATTERN = "product + reduce_scatter"


class Scattered(NamedTuple):
    """What a reduce_scatter is given: ``source``, reshaped, split along a dimension, and joined by ranks."""

    source: Node
    passed: set[Node]
    """What is between."""
    how: Blocks | None
    """How the rows of the source become rows by ranks; None where they are."""
    extents: list[Any] | None
    """Of the result, numbers or nodes, of which one may be -1; None where more are not known."""
    by_columns: bool = False


def fuse(graph: Graph, report: FusionReport) -> None:
    """Replace each such product and scatter by one operator, in the place of the product."""
    for node in graph.find_nodes(op="call_function", target=c10d.reduce_scatter_tensor.default):
        given = _joined(graph, node, _scattered(node))
        kept = _kept(node, given)
        report.append(Fusion(PATTERN, kept, where(node)))
        if kept is None:
            _replace(graph, node, given)


def _scattered(node: Node) -> Scattered:
    source, _, size, _ = arguments(node)
    passed: set[Node] = set()
    how, by_columns = None, False
    extents: list[Any] | None = known_extents(node)
    if extents is None and reshaped_rows(source):
        # A reshape is told its extents, of which the first is shared.
        extents = [-1, *arguments(source)[1][1:]]
    while True:
        rearranged = rejoined(source, size) if how is None else None
        if reshaped_rows(source):
            passed.add(source)
            source = arguments(source)[0]
        elif rearranged is not None and rearranged.joined == 0:
            passed |= {source, *between(rearranged.source)}
            shape = value_of(rearranged.source).shape
            by_columns = rearranged.split == len(shape) - 1
            # Split, the dimension is one of ranks, and one of what each gets.
            share = shape[rearranged.split] // size
            outer, inner = shape[: rearranged.split], (share, *shape[rearranged.split + 1 : -1])
            how = blocks(outer, (size,), inner)
            source = rearranged.source
        else:
            return Scattered(source, passed, how, extents, by_columns)


def _joined(graph: Graph, node: Node, given: Scattered) -> Scattered:
    """The same, but for a sum of products that has become one, if it can be fused then."""
    total = sum_of_products(given.source)
    if total is None:
        return given
    each_alone = [given._replace(source=each, passed=given.passed | total.passed) for each in total.products]
    if any(_kept(node, each) for each in each_alone):
        return given
    join(graph, given.source, total)
    return _scattered(node)


def _kept(node: Node, given: Scattered) -> str | None:
    """Why this reduce_scatter is not fused with what it adds up."""
    op, wait, product = arguments(node)[1], waited(node), given.source
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
    if given.how is not None and not given.how.known or given.extents is None:
        return "the extents of several dimensions are not known before it runs"
    return why_no_context(arguments(node)[-1])


def _replace(graph: Graph, node: Node, given: Scattered) -> None:
    product, (_, op, size, group), wait = given.source, arguments(node), waited(node)
    assert wait is not None
    a, b = arguments(product)
    # What its extents are computed of is there.
    with graph.inserting_before(node):
        if given.how is not None:
            a = swapped(graph, a, given.how)
        ranks = name_of_process_group(group)
        result = call(graph, torch.ops.iris.matmul_reduce_scatter.default, a, b, None, ranks)
        if op == "avg":
            result = call(graph, aten.div.Tensor, result, size)
        assert given.extents is not None
        result = shaped(graph, result, given.extents)
    result.meta = {**place_of(wait), "val": result.meta["val"]}
    wait.replace_all_uses_with(result)
    erase_unused(graph, {product, *given.passed, node, wait})
