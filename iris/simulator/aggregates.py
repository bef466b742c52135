"""Triton's aggregates as plain Python classes, so that their jitted methods can be called."""

import inspect
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction


def method(function: InterpretedFunction) -> Callable:
    """A jitted function as a method: it gets the object that it is called on as its first argument."""

    def bound(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    bound.__name__, bound.__doc__ = function.fn.__name__, function.fn.__doc__
    return bound


def aggregate(cls: type) -> type:
    """What ``@triton.aggregate`` does here: annotated names are fields; ``__init__`` is made if there is none."""
    fields: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        fields.update(inspect.get_annotations(base))
    defaults = {name: getattr(cls, name) for name in fields if hasattr(cls, name)}

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        values = defaults | dict(zip(fields, args, strict=False)) | kwargs
        if len(args) > len(fields) or values.keys() - fields.keys() or fields.keys() - values.keys():
            given = f"{len(args)} values and {list(kwargs)}"
            raise TypeError(f"{cls.__name__} has the fields {list(fields)}, but got {given}")
        for name, value in values.items():
            setattr(self, name, value)

    def __setattr__(self: Any, name: str, value: Any) -> None:
        if name not in fields:
            raise AttributeError(f"{cls.__name__} has no field {name!r}")
        # Constants are plain values in the simulator, here as everywhere.
        object.__setattr__(self, name, value.value if isinstance(value, tl.constexpr) else value)

    namespace: dict[str, Any] = {
        name: method(member) for name, member in vars(cls).items() if isinstance(member, InterpretedFunction)
    }
    if "__init__" not in vars(cls):
        namespace["__init__"] = __init__
    namespace["__setattr__"] = __setattr__
    namespace["__triton_aggregate__"] = True
    namespace["__aggregate_fields__"] = tuple(fields)
    namespace["__aggregate_defaults__"] = defaults
    for name, member in namespace.items():
        setattr(cls, name, member)
    return cls


def install() -> None:
    """Put `aggregate` in the place of Triton's, also for who has imported that under another name already."""
    tl.core.__simulated_aggregate__ = aggregate
    tl.core._aggregate.__code__ = _trampoline.__code__


def _trampoline(cls: Any) -> Any:
    # A global of the module whose function it becomes.
    return __simulated_aggregate__(cls)  # type: ignore[name-defined]  # noqa: F821
