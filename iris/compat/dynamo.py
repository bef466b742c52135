"""`disable`: has torch.compile leave a function out of its graphs, as the public `torch.compiler.disable` does.

The public function makes torch import its compiler, which takes a second, and wraps the function, which takes half a
microsecond a call. The marks of `torch._C._dynamo.eval_frame` on the function itself cost nothing. They are there in
torch 2.9 to 2.13. Where one is gone, `disable` calls the public function.
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
    """Have neither the function nor what it calls traced. With ``fullgraph=True`` torch's error says ``why``."""
    if not _HAS_MARKS:
        return torch.compiler.disable(function, reason=why)
    # The first mark is for calls of the function itself, and the second two are for traced functions that call it.
    _set_code_exec_strategy(function.__code__, _FrameExecStrategy(_SKIP, _SKIP))
    for name, value in (("_torchdynamo_disable", True), ("_torchdynamo_disable_msg", why)):
        setattr(function, name, value)
    return function
