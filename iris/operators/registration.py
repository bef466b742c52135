"""Operators of ``torch.library``: calls that torch.compile keeps in its graphs."""

from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library, infer_schema

from iris.operators.graph_break import breaks_graph

LIBRARY = Library("iris", "FRAGMENT")
"""Where they are registered, which lasts as long as this object."""


def operator(name: str, writes: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Makes the operator ``iris::name`` of a function that changes no arguments but those that it ``writes``.

    As ``torch.library.custom_op``, whose operators have torch import its compiler, for a second, when first called.
    """

    def define(function: Callable[..., Any]) -> Any:
        LIBRARY.define(name + infer_schema(function, mutates_args=writes), tags=(torch.Tag.pt2_compliant_tag,))
        # Of any device. A graph that breaks calls it as it is, and is not to look into it.
        LIBRARY.impl(name, breaks_graph("the inside of an operator")(function), "CompositeExplicitAutograd")
        return getattr(torch.ops.iris, name).default

    return define
