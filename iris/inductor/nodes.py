"""Reading graphs of torch.fx: which operator a node calls, who uses its result, and what it is computed from."""

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch.fx import Node

from iris import simulator
from iris.compat.inductor import RESHAPES, c10d, value_of

aten = torch.ops.aten
# Where Iris' operators run. Graphs may have others, such as sums on the CPU beside a GPU.
DEVICE = "cpu" if simulator.ACTIVE else "cuda"
CONVERSIONS = (torch.ops.prims.convert_element_type.default,)


def arguments(node: Node) -> tuple[Any, ...]:
    """What a node's operator is called with: nodes, numbers and other constants."""
    return node.args


def calls(node: Any, targets: Any) -> TypeGuard[Node]:
    """Whether this is a node that calls this operator, or one of these."""
    targets = targets if isinstance(targets, Sequence) else (targets,)
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def is_tensor(node: Any) -> TypeGuard[Node]:
    """Whether this is a node whose result is a tensor, and not an extent of one."""
    return isinstance(node, Node) and isinstance(value_of(node), torch.Tensor)


def known(condition: bool | torch.SymBool) -> bool:
    """Whether this is true of extents, whatever they turn out to be.

    Asking leaves no guard, which for a graph of gradients would come too late, and is no error where an extent is
    computed from data. ``if x == y:`` would be both.
    """
    if isinstance(condition, bool):
        return condition
    # Whoever has symbols has imported this, which takes a second.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def known_equal(shape: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether these are the same extents, whatever they turn out to be."""
    return len(shape) == len(other) and all(known(n == m) for n, m in zip(shape, other, strict=True))


def known_contiguous(value: torch.Tensor) -> bool:
    """Whether a tensor is contiguous, whatever its extents turn out to be."""
    stride: Any = 1
    for extent, its in reversed(list(zip(value.shape, value.stride(), strict=True))):
        if not (known(its == stride) or known(extent == 1)):
            return False
        stride = stride * extent
    return True


def depends_on_data(node: Node) -> bool:
    """Whether an extent of a node's result is computed from data, so that nothing is known of it."""
    if all(isinstance(extent, int) for extent in value_of(node).shape):
        return False
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(value_of(node).shape))


def reshaped_rows(node: Any) -> TypeGuard[Node]:
    """Whether this is a reshape that leaves rows, which lie along the last dimension, as they are."""
    return calls(node, RESHAPES) and known_equal(value_of(node).shape[-1:], value_of(arguments(node)[0]).shape[-1:])


def users(node: Node, targets: Any) -> list[Node]:
    """Those users of a node's result that call this operator, or one of these."""
    return [user for user in node.users if calls(user, targets)]


def only_user(node: Node) -> Node | None:
    """The node that alone uses this one's result."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def waited(collective: Node) -> Node | None:
    """The wait for a collective's result, if that alone uses it."""
    wait = only_user(collective)
    return wait if calls(wait, c10d.wait_tensor.default) else None


def ancestors(node: Node, until: Node) -> set[Node]:
    """What a node is computed from, as far as ``until``, which is one of them if it is reached."""
    found: set[Node] = set()
    open_ = [node]
    while open_:
        for each in open_.pop().all_input_nodes:
            if each not in found:
                found.add(each)
                if each is not until:
                    open_.append(each)
    return found


def place_of(node: Node) -> dict[str, Any]:
    """What a node's ``meta`` tells of its place in the program, for the one that comes in its place.

    The rest is of its operator and arguments: Inductor gives "eager_input_vals", say, to whatever operator is there.
    """
    return {key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta}
