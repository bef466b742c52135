"""Dispatch modes, through which torch passes each operation before it runs, and the operations that they see.

For the sanitizer and the simulator. The names are there in torch 2.9 to 2.13. Where one is gone, importing this file
raises `MissingPartError`. Not so for the two methods that `ObservingMode` overrides, of which
`TorchDispatchMode._should_skip_dynamo` is newer than 2.9. Without them torch imports its compiler at the first
operation, and refuses to compile under the mode.
"""

from typing import Any

from iris.compat.parts import member, required

_WHY = "see what a program does with torch"
TorchDispatchMode = required("torch.utils._python_dispatch:TorchDispatchMode", _WHY)

hidden_from_modes = required("torch._C:_DisableTorchDispatch", "keep the simulator's own use of torch out of its notes")
"""A context manager: in it the modes of this thread see no operations."""

# The operations that modes see where a program calls `to` and `index_put_`.
to_copy = required("torch:ops.aten._to_copy.default", _WHY)
index_put_impl_ = required("torch:ops.aten._index_put_impl_.default", _WHY)


class ObservingMode(TorchDispatchMode):  # type: ignore[valid-type, misc]  # found by its name
    """The base of modes that only look, and change no operation."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True: torch compiles programs under this mode."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch would otherwise import its compiler at the first operation, to keep this mode out of graphs."""
        return False


def arguments_of(operation: Any) -> list[Any]:
    """The arguments of an operation's schema, each with its name and what it aliases."""
    return member(operation, "torch._ops:OpOverload._schema", _WHY).arguments


def results_of(operation: Any) -> list[Any]:
    """The results of an operation's schema, each with what it aliases."""
    return member(operation, "torch._ops:OpOverload._schema", _WHY).returns


def operation_name(operation: Any) -> str:
    """The operation's name without its namespace and overload."""
    return member(operation, "torch._ops:OpOverload._opname", _WHY)
