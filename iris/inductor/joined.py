"""Sums of products become one of joined matrices: ``a b + c d = (a c) (b d)``, side by side and one below another.

Such a sum is the gradient of rows that several products have, as those of queries, keys and values, or of gate and up.
Joined, it is fused with what adds it up among the ranks. The joined matrices are copies. That of the left ones costs
nothing where what makes them can write them there. The right ones are weights, so the sum must have many rows.

Whether to join depends on nothing that ranks may have different numbers of, as they may have of a weight's columns.
"""

from typing import NamedTuple

from torch.fx import Graph, Node

from iris.compat.inductor import value_of
from iris.inductor.nodes import arguments, aten, calls, is_tensor, known, known_equal, reshaped_rows
from iris.inductor.rows import call, erase_unused, known_extents

# Rows of the sum, at least. To add up half a row among two ranks takes 1 byte over the link for each column of bf16, at
# 350 GB/s; to copy a row of the right matrix 4 bytes of memory traffic, at about 4000 GB/s (H200). So this many are
# worth the copies of some 12 000 rows, as a layer of 8B dimensions has for gate and up.
LEAST_ROWS = 4096


class Sum(NamedTuple):
    """Of products: at least two, and the additions and reshapes after them."""

    products: list[Node]
    passed: set[Node]


def sum_of_products(node: Node) -> Sum | None:
    """What ``node`` adds up, if that are products alone whose join is worth it."""
    products: list[Node] = []
    passed: set[Node] = set()
    open_ = [node]
    while open_:
        each = open_.pop()
        if _adds(each):
            passed.add(each)
            open_ += reversed(arguments(each))
        elif reshaped_rows(each):
            passed.add(each)
            open_.append(arguments(each)[0])
        elif calls(each, aten.mm.default):
            products.append(each)
        else:
            return None
    if len(products) < 2 or known_extents(node) is None:
        return None
    return Sum(products, passed) if known(value_of(products[0]).shape[0] >= LEAST_ROWS) else None


def _adds(node: Node) -> bool:
    """Whether it is a sum of two tensors of its own shape and dtype."""
    if not calls(node, aten.add.Tensor) or node.kwargs or not all(is_tensor(each) for each in arguments(node)):
        return False
    whole = value_of(node)
    values = [value_of(each) for each in arguments(node)]
    return all(known_equal(each.shape, whole.shape) and each.dtype == whole.dtype for each in values)


def join(graph: Graph, node: Node, total: Sum) -> None:
    """Put one product in the place of ``node``, which adds up these, and which alone uses them."""
    left, right = ([arguments(each)[number] for each in total.products] for number in range(2))
    with graph.inserting_before(node):
        product = call(
            graph, aten.mm.default, call(graph, aten.cat.default, left, 1), call(graph, aten.cat.default, right)
        )
        result = call(graph, aten.reshape.default, product, known_extents(node))
    node.replace_all_uses_with(result)
    erase_unused(graph, {*total.products, *total.passed})
