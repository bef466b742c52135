"""A product, and the all_reduce of it: `iris::matmul_all_reduce`."""

import torch
from torch.fx import Graph, Node

from iris.ccl.functional import name_of_process_group
from iris.compat.inductor import c10d, value_of
from iris.distributed.contexts import why_no_context
from iris.inductor.nodes import DEVICE, arguments, aten, calls, keeps_rows, place_of, wait_of
from iris.inductor.report import Fusion, FusionReport, where
from iris.inductor.rows import used_only_by
from iris.ops.call import WIDE

PATTERN = "product + all_reduce"


def fuse(graph: Graph, report: FusionReport) -> None:
    """Replace each product and all_reduce by one operator, in the place of the product."""
    for node in graph.find_nodes(op="call_function", target=c10d.all_reduce.default):
        product, passed = arguments(node)[0], set()
        while keeps_rows(product):
            passed.add(product)
            product = arguments(product)[0]
        kept = _why_not_fused(node, product, passed)
        report.append(Fusion(PATTERN, kept, where(node)))
        if kept is None:
            _replace(graph, node, product)


def _why_not_fused(node: Node, product: Node, passed: set[Node]) -> str | None:
    """The reason for the report; None if an all_reduce and its product can be fused.

    ``passed``: the reshapes between them.
    """
    if arguments(node)[1] != "sum":
        return f"the reduction is {arguments(node)[1]!r}"
    if not calls(product, aten.mm.default):
        what = f"the result of {product.target}" if product.op == "call_function" else "an input of the graph"
        return f"what is summed is {what} and not of a product"
    if not used_only_by(product, node, passed):
        return "the product is used elsewhere"
    if wait_of(node) is None:
        return "the sum is used before it is waited for"
    if value_of(product).dtype not in WIDE:
        return f"the product is {value_of(product).dtype}"
    if value_of(product).device.type != DEVICE:
        return f"it is computed on {value_of(product).device}"
    return why_no_context(arguments(node)[-1])


def _replace(graph: Graph, node: Node, product: Node) -> None:
    input, _, group = arguments(node)
    with graph.inserting_before(product):
        given = (*product.args, None, name_of_process_group(group))
        total = graph.call_function(torch.ops.iris.matmul_all_reduce.default, given)
    total.meta = {**place_of(product), "val": value_of(product)}
    product.replace_all_uses_with(total)
    wait = wait_of(node)
    assert wait is not None
    # The reshapes between the product and the all_reduce are of the sum now.
    wait.replace_all_uses_with(total if input is product else input)
    for gone in (wait, node, product):
        graph.erase_node(gone)
