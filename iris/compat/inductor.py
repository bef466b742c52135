"""Passes over the graphs of Inductor, torch.compile's compiler, and what these graphs are made of.

`torch._inductor.config.post_grad_custom_pre_pass` and `torch._inductor.custom_graph_pass.CustomGraphPass` are there in
torch 2.9 to 2.13. Where one is gone, its user here raises `MissingPartError`. Importing them takes a second, so they
are looked for when they are used.

Iris also relies on these: the fake tensor of a node is at ``meta["val"]``. After its passes Inductor replaces
``auto_functionalized`` nodes by the operator, and copies a tensor that it writes only if its old value is read later.
"""

import hashlib
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch.fx import Graph, Node

from iris.compat.parts import required

c10d = torch.ops._c10d_functional
"""The functional collectives. In graphs, collectives that write into a tensor have become these, too."""

RESHAPES = (torch.ops.aten.reshape.default, torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)

_FUSES = "fuse operations in graphs of torch.compile"


def graph_pass(change: Callable[[Graph], None], identity: Callable[[], str | None]) -> Any:
    """A pass that calls ``change`` on forward and backward graphs, after the passes that are set by now.

    What ``identity`` returns is part of the keys of Inductor's cache, as the graph depends on it. With None, Inductor
    caches nothing.
    """
    kind = required("torch._inductor.custom_graph_pass:CustomGraphPass", _FUSES)
    there = required("torch._inductor.config:post_grad_custom_pre_pass", _FUSES)
    before = [] if there is None else list(there) if isinstance(there, (list, tuple)) else [there]

    class Pass(kind):  # type: ignore[misc, valid-type]
        def __call__(self, graph: Graph) -> None:
            for each in before:
                each(graph)
            change(graph)

        def uuid(self) -> Any:
            """The pass's part of a key. None, without caching, if another pass has none of its own."""
            known = [*(each.uuid() if isinstance(each, kind) else None for each in before), identity()]
            return None if None in known else hashlib.sha256(repr(known).encode()).hexdigest()

    return Pass()


def add_graph_pass(change: Callable[[Graph], None], identity: Callable[[], str | None]) -> None:
    """Let ``change`` see each graph that Inductor compiles from now on, as `graph_pass` does."""
    made = graph_pass(change, identity)
    config: Any = import_module("torch._inductor.config")
    config.post_grad_custom_pre_pass = made


def value_of(node: Node) -> torch.Tensor:
    """The fake tensor of a node's result."""
    return node.meta["val"]


def writes(graph: Graph, operator: Any, arguments: dict[str, Any]) -> Node:
    """Add a call of an operator that writes to some of its arguments. Its value: the results, then what is written."""
    return graph.call_function(torch.ops.higher_order.auto_functionalized, (operator,), arguments)
