"""Graph breaks: torch.compile leaves these functions out of its graphs, and they run as they would without it.

The host's calls look at addresses and streams, which a graph does not have. `iris.ccl.functional`,
`iris.ops.functional` and `iris.experts.functional` have what it does: operators.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

from iris.compat import dynamo

Function = TypeVar("Function", bound=Callable)


def breaks_graph(why: str) -> Callable[[Function], Function]:
    """Marks a function, so that neither it nor what it calls is traced; with ``fullgraph=True`` torch says ``why``."""
    return lambda function: dynamo.disable(function, why)


def methods_break_graph(why: str) -> Callable[[type], type]:
    """Marks the public methods of a class."""

    def mark(cls: Any) -> Any:
        for name, method in list(vars(cls).items()):
            if isinstance(method, FunctionType) and not name.startswith("_"):
                setattr(cls, name, breaks_graph(why)(method))
        return cls

    return mark
