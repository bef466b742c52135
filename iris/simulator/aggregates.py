"""``@triton.aggregate`` in the simulator: makes a plain Python class whose jitted methods can be called."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import triton.language as tl

from iris.compat.aggregate import marks, replace_aggregate
from iris.compat.interpreter import InterpretedFunction


def method(function: InterpretedFunction) -> Callable:
    """A jitted function as a method. (Python binds functions alone to the object on which they are called.)"""

    @functools.wraps(function.fn)
    def bound(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return bound


def aggregate(cls: type) -> type:
    """The decorator. Annotated names are fields. A class without an ``__init__`` gets one that takes them."""
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
        # In the simulator compile-time constants are plain values.
        object.__setattr__(self, name, value.value if isinstance(value, tl.constexpr) else value)

    namespace: dict[str, Any] = {
        name: method(member) for name, member in vars(cls).items() if isinstance(member, InterpretedFunction)
    }
    if "__init__" not in vars(cls):
        namespace["__init__"] = __init__
    namespace["__setattr__"] = __setattr__
    namespace |= marks(tuple(fields), defaults)
    for name, member in namespace.items():
        setattr(cls, name, member)
    return cls


def install() -> None:
    """Put `aggregate` in the place of Triton's, also in modules that have imported that already."""
    replace_aggregate(aggregate)
