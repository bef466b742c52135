"""Sums of products become one of joined matrices: ``a b + c d = (a c) (b d)``, side by side and one below another.

Such a sum is the gradient of rows that several products have, as those of queries, keys and values, or of gate and up.
Joined, it is fused with what adds it up among the ranks. The joined matrices are copies. That of the left ones costs
nothing where what makes them can write them there. The right ones are weights, so they must not be too large.
"""

from typing import NamedTuple

from torch.fx import Graph, Node

from iris.compat.inductor import value_of
from iris.inductor.nodes import arguments, aten, calls, is_tensor, reshaped_rows
from iris.inductor.rows import call, erase_unused, known_extents

# Rows of the joined right matrix for each row of the sum, at most. To copy a row takes 4 bytes of memory traffic for
# each column of bf16, at about 4000 GB/s; to add up half a row over the link, 1 byte at 350 (H200, two ranks).
MOST_DEPTH = 2


class Sum(NamedTuple):
    """Of products: at least two, and the additions and reshapes behind them."""

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
    depth, rows = sum(value_of(arguments(each)[1]).shape[0] for each in products), value_of(products[0]).shape[0]
    known = isinstance(depth, int) and isinstance(rows, int)
    return Sum(products, passed) if known and depth <= MOST_DEPTH * rows else None


def _adds(node: Node) -> bool:
    """Whether it is a sum of two tensors of its own shape and dtype."""
    if not calls(node, aten.add.Tensor) or node.kwargs or not all(is_tensor(each) for each in arguments(node)):
        return False
    whole = value_of(node)
    return all((value_of(each).shape, value_of(each).dtype) == (whole.shape, whole.dtype) for each in arguments(node))


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
