"""The rows of all ranks, and their products with matrices: `iris::all_gather_matmul`.

One product is fused, that with the most columns. Where others have the same rows, or a gradient needs them, the
operator returns them too (`iris::all_gather_matmul_return_a`), and the rest of the graph goes on with these.
"""

import operator
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from iris.ccl.functional import name_of_process_group
from iris.compat.inductor import c10d, value_of
from iris.distributed.contexts import why_no_context
from iris.inductor.nodes import (
    DEVICE,
    ancestors,
    arguments,
    aten,
    calls,
    depends_on_data,
    known_equal,
    place_of,
    waited,
)
from iris.inductor.report import Fusion, FusionReport, where
from iris.inductor.rows import (
    Blocks,
    ask_for_extents,
    between,
    call,
    carriers,
    erase_unused,
    flattened,
    inner_extents,
    rejoined,
    shaped,
    swapped,
    used_only_by,
)
from iris.ops.call import WIDE

PATTERN = "all_gather + product"


class Product(NamedTuple):
    """A product with gathered rows, and how these are in another order than by ranks."""

    node: Node
    b: Node
    bias: Node | None
    how: Blocks | None


def fuse(graph: Graph, report: FusionReport) -> None:
    """Replace each gather and its largest product by one operator."""
    for node in graph.find_nodes(op="call_function", target=c10d.all_gather_into_tensor.default):
        shard, size, _ = arguments(node)
        ask_for_extents(graph, node, shard, size, dim=0)
        wait = waited(node)
        found = {} if wait is None else carriers(wait, size)
        for rows in found:
            how = rejoined(rows, size)
            if rows is wait:
                ask_for_extents(graph, rows, shard, size, dim=0)
            elif how is not None and how.source is wait:
                ask_for_extents(graph, rows, shard, size, dim=how.joined)
        product = _largest(graph, found)
        kept = _kept(wait, found, product)
        report.append(Fusion(PATTERN, kept, where(node if product is None else product.node)))
        if kept is None:
            assert wait is not None and product is not None
            _replace(graph, wait, found, product)


def _largest(graph: Graph, found: dict[Node, Blocks | None]) -> Product | None:
    """The product with the most columns, the first of them in the graph."""
    products = {each.node: each for rows, how in found.items() for each in _products(rows, how)}
    in_order = [products[node] for node in graph.nodes if node in products] if products else []
    return max(in_order, key=lambda each: _known(value_of(each.node).shape[1]), default=None)


def _known(extent: Any) -> int:
    return extent if isinstance(extent, int) else 0


def _products(rows: Node, how: Blocks | None) -> list[Product]:
    found = []
    for user in rows.users:
        if calls(user, aten.mm.default) and arguments(user)[0] is rows:
            found.append(Product(user, arguments(user)[1], None, how))
        elif calls(user, aten.addmm.default) and arguments(user)[1] is rows and not user.kwargs:
            if known_equal(value_of(arguments(user)[0]).shape, value_of(user).shape[1:]):
                found.append(Product(user, arguments(user)[2], arguments(user)[0], how))
    return found


def _kept(wait: Node | None, found: dict[Node, Blocks | None], product: Product | None) -> str | None:
    """Why these are not fused."""
    if wait is None:
        return "what is gathered is used before it is waited for"
    if product is None:
        return "no product has what is gathered as its rows"
    tensors = [each for each in (wait, product.b, product.bias) if each is not None]
    others = [value_of(each).dtype for each in tensors if value_of(each).dtype not in WIDE]
    if others:
        return f"there is a tensor of {others[0]}"
    if value_of(wait).device.type != DEVICE:
        return f"it is computed on {value_of(wait).device}"
    if depends_on_data(wait):
        return "an extent of what is gathered is computed from data"
    if any(wait in ancestors(each, wait) | {each} for each in tensors[1:]):
        return "the other matrix depends on what is gathered"
    if product.how is not None and not product.how.known:
        return "the extents of several dimensions are not known before it runs"
    return why_no_context(arguments(wait.all_input_nodes[0])[-1])


def _passed(found: dict[Node, Blocks | None]) -> set[Node]:
    """What has the rows, and what is between."""
    return {*found, *(each for rows in found for each in between(rows))}


def _replace(graph: Graph, wait: Node, found: dict[Node, Blocks | None], product: Product) -> None:
    gather = wait.all_input_nodes[0]
    input, _, group = arguments(gather)
    place, passed = product.node, _passed(found)
    alone = used_only_by(wait, product.node, passed)
    if not alone:
        # Others have the rows, maybe before the product. So it goes where they are there, and what it needs before it.
        needed = {product.b, *ancestors(product.b, wait)}
        if product.bias is not None:
            needed |= {product.bias, *ancestors(product.bias, wait)}
        _bring_before(wait, product.node, needed)
        place = wait
    with graph.inserting_before(place):
        operands = (flattened(graph, input), product.b, product.bias, name_of_process_group(group))
        if alone:
            result = call(graph, torch.ops.iris.all_gather_matmul.default, *operands)
        else:
            both = call(graph, torch.ops.iris.all_gather_matmul_return_a.default, *operands)
            result, rows = (call(graph, operator.getitem, both, number) for number in range(2))
            wait.replace_all_uses_with(shaped(graph, rows, [-1, *inner_extents(graph, input)]))
        if product.how is not None:
            result = swapped(graph, result, product.how)
    result.meta = {**place_of(product.node), "val": result.meta["val"]}
    product.node.replace_all_uses_with(result)
    erase_unused(graph, {product.node, *passed, gather})


def _bring_before(place: Node, end: Node, needed: set[Node]) -> None:
    """Move those nodes that are needed, and come between these two, ahead of the first."""
    node = place.next
    while node is not end:
        following = node.next
        if node in needed:
            place.prepend(node)
        node = following
