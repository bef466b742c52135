"""Where Inductor, torch.compile's compiler, has others change its graphs, and what its graphs are made of.

`torch._inductor.config.post_grad_custom_pre_pass` and `torch._inductor.custom_graph_pass.CustomGraphPass` are there in
torch 2.9 to 2.13; where one is gone, its user here raises `MissingPartError`. Importing them takes a second, so they
are looked for when they are used. Relied on as well: the fake tensor of a node at ``meta["val"]``, and that Inductor
takes ``auto_functionalized`` apart after its passes, and copies what it says is written only where that is read later.
"""

import hashlib
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch.fx import Graph, Node

from iris.compat.parts import required

c10d = torch.ops._c10d_functional
"""The functional collectives, as graphs have them; what others write becomes one of these."""

RESHAPES = (torch.ops.aten.reshape.default, torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)

_FUSES = "fuse operations in graphs of torch.compile"


def graph_pass(change: Callable[[Graph], None], identity: Callable[[], str | None]) -> Any:
    """A pass by which ``change`` sees graphs of both directions, after the passes that are set by now.

    What ``identity`` returns goes into the keys of Inductor's cache: another one, another graph. None: no cache.
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
            """None, with which Inductor caches nothing, where a pass does not say what it is."""
            known = [*(each.uuid() if isinstance(each, kind) else None for each in before), identity()]
            return None if None in known else hashlib.sha256(repr(known).encode()).hexdigest()

    return Pass()


def add_graph_pass(change: Callable[[Graph], None], identity: Callable[[], str | None]) -> None:
    """Let ``change`` see each graph that Inductor compiles from now on, as `graph_pass` does."""
    made = graph_pass(change, identity)
    config: Any = import_module("torch._inductor.config")
    config.post_grad_custom_pre_pass = made


def value_of(node: Node) -> torch.Tensor:
    """The fake tensor that stands for a node's result."""
    return node.meta["val"]


def writes(graph: Graph, operator: Any, arguments: dict[str, Any]) -> Node:
    """A call of an operator that writes some of its arguments: a tuple of its results, and of what is written."""
    return graph.call_function(torch.ops.higher_order.auto_functionalized, (operator,), arguments)
