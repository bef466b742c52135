"""Marks on functions that torch.compile leaves out of its graphs.

`torch.compiler.disable` is the public way. It has torch import its compiler, for a second, and puts a function around
the marked one, for half a microsecond a call. The marks of `torch._C._dynamo.eval_frame` on the function itself cost
nothing; they are there in torch 2.9 to 2.13. Where one is gone, `disable` is the public way.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from iris.compat.parts import optional

Function = TypeVar("Function", bound=Callable)

_set_code_exec_strategy: Any = optional("torch._C._dynamo.eval_frame:set_code_exec_strategy")
_FrameExecStrategy: Any = optional("torch._C._dynamo.eval_frame:_FrameExecStrategy")
_SKIP = optional("torch._C._dynamo.eval_frame:_FrameAction.SKIP")
_HAS_MARKS = all(part is not None for part in (_set_code_exec_strategy, _FrameExecStrategy, _SKIP))


def disable(function: Function, why: str) -> Function:
    """Neither the function nor what it calls is traced; with ``fullgraph=True`` torch says ``why``."""
    if not _HAS_MARKS:
        return torch.compiler.disable(function, reason=why)
    # When it is called, and when a function is traced that calls it.
    _set_code_exec_strategy(function.__code__, _FrameExecStrategy(_SKIP, _SKIP))
    for name, value in (("_torchdynamo_disable", True), ("_torchdynamo_disable_msg", why)):
        setattr(function, name, value)
    return function
