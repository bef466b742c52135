"""A sum of products becomes one product: ``a @ b + c @ d = cat((a, c), 1) @ cat((b, d), 0)``.

Such a sum is the gradient of rows that several products share: those of queries, keys and values, or of gate and up.
As one product it can be fused with the reduce_scatter after it. The concatenated matrices are copies. That of the left
ones costs nothing where Inductor has what computes them write there. The right ones are weights, so the sum must have
many rows to be worth their copy.

All ranks decide alike: by the rows of the sum, and not by the columns of a weight, which may be split unevenly.
"""

from typing import NamedTuple

from torch.fx import Graph, Node

from iris.compat.inductor import value_of
from iris.inductor.nodes import arguments, aten, calls, is_tensor, keeps_rows, known, known_equal
from iris.inductor.rows import call, erase_unused, extents_for_view

# Rows of the sum, at least. From times of a column of bf16 on two H200: fusing hides, for each row of the sum, 1 byte
# over the link (half of 2) at 350 GB/s, 2.9 ps. The copy takes, for each row of the right matrix, 4 bytes of memory
# traffic at about 4000 GB/s, 1 ps. So this many rows pay for a right matrix of some 12 000, as a layer of 8B dimensions
# has for gate and up.
LEAST_ROWS = 4096


class ProductSum(NamedTuple):
    """At least two products, and the additions and reshapes by which their sum is formed."""

    products: list[Node]
    passed: set[Node]


def sum_of_products(node: Node) -> ProductSum | None:
    """What ``node`` adds up, if that is nothing but products, and the sum has `LEAST_ROWS`."""
    products: list[Node] = []
    passed: set[Node] = set()
    to_visit = [node]
    while to_visit:
        each = to_visit.pop()
        if _adds(each):
            passed.add(each)
            to_visit += reversed(arguments(each))
        elif keeps_rows(each):
            passed.add(each)
            to_visit.append(arguments(each)[0])
        elif calls(each, aten.mm.default):
            products.append(each)
        else:
            return None
    if len(products) < 2 or extents_for_view(node) is None:
        return None
    return ProductSum(products, passed) if known(value_of(products[0]).shape[0] >= LEAST_ROWS) else None


def _adds(node: Node) -> bool:
    """Whether it is a sum of two tensors of its own shape and dtype."""
    if not calls(node, aten.add.Tensor) or node.kwargs or not all(is_tensor(each) for each in arguments(node)):
        return False
    whole = value_of(node)
    values = [value_of(each) for each in arguments(node)]
    return all(known_equal(each.shape, whole.shape) and each.dtype == whole.dtype for each in values)


def join(graph: Graph, node: Node, total: ProductSum) -> None:
    """Put one product in the place of ``node``, which is this sum, and which alone uses its parts."""
    left, right = ([arguments(each)[number] for each in total.products] for number in range(2))
    with graph.inserting_before(node):
        product = call(
            graph, aten.mm.default, call(graph, aten.cat.default, left, 1), call(graph, aten.cat.default, right)
        )
        result = call(graph, aten.reshape.default, product, extents_for_view(node))
    node.replace_all_uses_with(result)
    erase_unused(graph, {*total.products, *total.passed})
