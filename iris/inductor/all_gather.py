"""An all_gather, and products with the gathered rows: `iris::all_gather_matmul`.

One product is fused, that with the most columns. Where other nodes use the gathered rows, such as further products or
gradients, the operator returns these too (`iris::all_gather_matmul_return_a`).
"""

import operator
from typing import NamedTuple

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
    wait_of,
)
from iris.inductor.report import Fusion, FusionReport, where
from iris.inductor.rows import (
    Permutation,
    ask_for_extents,
    call,
    carriers,
    erase_unused,
    flattened,
    inner_extents,
    permuted,
    rejoined,
    shaped,
    splits_and_parts,
    used_only_by,
)
from iris.ops.call import WIDE

PATTERN = "all_gather + product"


class Product(NamedTuple):
    """``rows @ b + bias`` of gathered rows."""

    node: Node
    b: Node
    bias: Node | None
    how: Permutation | None
    """From rows by ranks to those of this product; None where they are by ranks."""


def fuse(graph: Graph, report: FusionReport) -> None:
    """Replace each all_gather and its largest product by one operator."""
    for node in graph.find_nodes(op="call_function", target=c10d.all_gather_into_tensor.default):
        shard, size, _ = arguments(node)
        ask_for_extents(graph, node, shard, size, dim=0)
        wait = wait_of(node)
        found = {} if wait is None else carriers(wait, size)
        for rows in found:
            how = rejoined(rows, size)
            if rows is wait:
                ask_for_extents(graph, rows, shard, size, dim=0)
            elif how is not None and how.source is wait:
                ask_for_extents(graph, rows, shard, size, dim=how.joined)
        product = _largest(graph, found)
        kept = _why_not_fused(wait, product)
        report.append(Fusion(PATTERN, kept, where(node if product is None else product.node)))
        if kept is None:
            assert wait is not None and product is not None
            _replace(graph, wait, found, product)


def _largest(graph: Graph, found: dict[Node, Permutation | None]) -> Product | None:
    """The product with the most columns, the first of them in the graph."""
    products = {each.node: each for rows, how in found.items() for each in _products(rows, how)}
    # `found` is in the order of the search, in which ties would be decided otherwise.
    in_order = [products[node] for node in graph.nodes if node in products] if products else []
    return max(in_order, key=_columns, default=None)


def _columns(product: Product) -> int:
    """Of its result; 0 if that is not known before the graph runs."""
    columns = value_of(product.node).shape[1]
    return columns if isinstance(columns, int) else 0


def _products(rows: Node, how: Permutation | None) -> list[Product]:
    """The products with ``rows`` on the left; of `addmm`, those with ``beta = alpha = 1`` and a bias ``[N]``."""
    found = []
    for user in rows.users:
        if calls(user, aten.mm.default) and arguments(user)[0] is rows:
            found.append(Product(user, arguments(user)[1], None, how))
        elif calls(user, aten.addmm.default) and arguments(user)[1] is rows and not user.kwargs:
            if known_equal(value_of(arguments(user)[0]).shape, value_of(user).shape[1:]):
                found.append(Product(user, arguments(user)[2], arguments(user)[0], how))
    return found


def _why_not_fused(wait: Node | None, product: Product | None) -> str | None:
    """The reason for the report; None if they can be fused."""
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
    if product.how is not None and not product.how.is_known:
        return "the extents of several dimensions are not known before it runs"
    return why_no_context(arguments(wait.all_input_nodes[0])[-1])


def _passed(found: dict[Node, Permutation | None]) -> set[Node]:
    """The nodes that have the gathered rows, and those that split them."""
    return {*found, *(each for rows in found for each in splits_and_parts(rows))}


def _replace(graph: Graph, wait: Node, found: dict[Node, Permutation | None], product: Product) -> None:
    gather = wait.all_input_nodes[0]
    input, _, group = arguments(gather)
    place, passed = product.node, _passed(found)
    alone = used_only_by(wait, product.node, passed)
    if not alone:
        # Other users of the rows may come before the product. So the operator goes where the wait is, and what it needs
        # goes before that.
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
            result = permuted(graph, result, product.how)
    result.meta = {**place_of(product.node), "val": result.meta["val"]}
    product.node.replace_all_uses_with(result)
    erase_unused(graph, {product.node, *passed, gather})


def _bring_before(place: Node, end: Node, needed: set[Node]) -> None:
    """Move the ``needed`` nodes between ``place`` and ``end`` to before ``place``, in their order."""
    node = place.next
    while node is not end:
        following = node.next
        if node in needed:
            place.prepend(node)
        node = following
