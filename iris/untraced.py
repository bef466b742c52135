"""What torch.compile leaves out of its graphs: a call of it breaks the graph, and runs as it would without a compiler.

The host's calls look at addresses and streams, which a graph does not have. `iris.ccl.functional` and
`iris.ops.functional` have what it does: operators.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import torch

try:
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
except ImportError:
    set_code_exec_strategy = None  # type: ignore[assignment]

Function = TypeVar("Function", bound=Callable)


def untraced(why: str) -> Callable[[Function], Function]:
    """Marks a function, so that neither it nor what it calls is traced; with ``fullgraph=True`` torch says ``why``.

    As ``torch.compiler.disable``, which has torch import its compiler, for a second, and puts a function around this
    one, for half a microsecond a call. The same marks on the function itself cost nothing.
    """

    def mark(function: Function) -> Function:
        if set_code_exec_strategy is None:
            return torch.compiler.disable(function, reason=why)
        # When it is called, and when a function is traced that calls it.
        set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
        for name, value in (("_torchdynamo_disable", True), ("_torchdynamo_disable_msg", why)):
            setattr(function, name, value)
        return function

    return mark


def untraced_methods(why: str) -> Callable[[type], type]:
    """Marks the public methods of a class."""

    def mark(cls: Any) -> Any:
        for name, method in list(vars(cls).items()):
            if isinstance(method, FunctionType) and not name.startswith("_"):
                setattr(cls, name, untraced(why)(method))
        return cls

    return mark
