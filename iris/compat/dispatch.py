"""Modes, through which torch passes each operation before it is carried out, and the operations that they see.

For the sanitizer and the simulator. The names are there in torch 2.9 to 2.13, but for
`TorchDispatchMode._should_skip_dynamo`, which is newer. Where one is gone, importing this file raises
`MissingPartError`. The two methods that `ObservingMode` overrides may be gone without harm: then torch imports its
compiler at the first operation, and refuses to compile under the mode.
"""

from typing import Any

from iris.compat.parts import member, required

_WHY = "see what a program does with torch"
TorchDispatchMode = required("torch.utils._python_dispatch:TorchDispatchMode", _WHY)

hidden_from_modes = required("torch._C:_DisableTorchDispatch", "keep the simulator's own use of torch out of its notes")
"""A context in which this thread's modes see nothing."""

# What torch carries out in the place of `to` and of `index_put_`.
to_copy = required("torch:ops.aten._to_copy.default", _WHY)
index_put_impl_ = required("torch:ops.aten._index_put_impl_.default", _WHY)


class ObservingMode(TorchDispatchMode):  # type: ignore[valid-type, misc]  # found by its name
    """A mode that changes nothing."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Programs may be compiled under it."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would import its compiler at the first operation to leave `__torch_dispatch__` out of graphs."""
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
