"""Reading graphs of torch.fx: which operator a node calls, who uses its result, and what it is computed from."""

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch.fx import Node

from iris import simulator
from iris.compat.inductor import RESHAPES, c10d, value_of

aten = torch.ops.aten
# The type of device that Iris' operators run on. Graphs may have collectives on others, such as Gloo's beside a GPU's.
DEVICE = "cpu" if simulator.ACTIVE else "cuda"
CONVERSIONS = (torch.ops.prims.convert_element_type.default,)


def arguments(node: Node) -> tuple[Any, ...]:
    """``node.args``: nodes, numbers and other constants. As Any, since the operator says what they are."""
    return node.args


def calls(node: Any, targets: Any) -> TypeGuard[Node]:
    """Whether this is a node that calls this operator, or one of these."""
    targets = targets if isinstance(targets, Sequence) else (targets,)
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def is_tensor(node: Any) -> TypeGuard[Node]:
    """Whether this is a node whose result is a tensor, and not a number, as an extent is."""
    return isinstance(node, Node) and isinstance(value_of(node), torch.Tensor)


def known(condition: bool | torch.SymBool) -> bool:
    """Whether a comparison of extents is true for all values that they may have.

    Unlike ``if x == y:`` it adds no guard, which would be too late for a graph of gradients, and does not raise where
    an extent is computed from data.
    """
    if isinstance(condition, bool):
        return condition
    # Here, as it takes a second to import, which whoever has symbols has done.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def known_equal(shape: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether these are the same extents, for all values that they may have."""
    return len(shape) == len(other) and all(known(n == m) for n, m in zip(shape, other, strict=True))


def known_contiguous(value: torch.Tensor) -> bool:
    """Whether a tensor is contiguous, for all values that its extents may have."""
    stride: Any = 1
    for extent, its in reversed(list(zip(value.shape, value.stride(), strict=True))):
        if not (known(its == stride) or known(extent == 1)):
            return False
        stride = stride * extent
    return True


def depends_on_data(node: Node) -> bool:
    """Whether an extent of a node's result is an unbacked symbol: computed from data, so that nothing is known."""
    if all(isinstance(extent, int) for extent in value_of(node).shape):
        return False
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(value_of(node).shape))


def keeps_rows(node: Any) -> TypeGuard[Node]:
    """Whether this is a reshape that leaves rows, which lie along the last dimension, as they are."""
    return calls(node, RESHAPES) and known_equal(value_of(node).shape[-1:], value_of(arguments(node)[0]).shape[-1:])


def users(node: Node, targets: Any) -> list[Node]:
    """Those users of a node's result that call this operator, or one of these."""
    return [user for user in node.users if calls(user, targets)]


def only_user(node: Node) -> Node | None:
    """The node that alone uses this one's result."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def wait_of(collective: Node) -> Node | None:
    """The wait for a collective's result, if that alone uses it."""
    wait = only_user(collective)
    return wait if calls(wait, c10d.wait_tensor.default) else None


def ancestors(node: Node, until: Node) -> set[Node]:
    """The nodes that a node is computed from; not those that ``until``, which may be among them, is computed from."""
    found: set[Node] = set()
    to_visit = [node]
    while to_visit:
        for each in to_visit.pop().all_input_nodes:
            if each not in found:
                found.add(each)
                if each is not until:
                    to_visit.append(each)
    return found


def place_of(node: Node) -> dict[str, Any]:
    """What a node's ``meta`` says of its place in the program, for the node that replaces it.

    The other entries belong to its operator and arguments. A replacement must not have them: Inductor would apply
    "eager_input_vals", say, to the wrong operator.
    """
    return {key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta}
