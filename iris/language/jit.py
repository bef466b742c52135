"""`jit` and `aggregate`: device code that is written once, and used by kernels in Triton and in Gluon.

    @jit
    def fence():            # in ``tl``, at the top level of a module; Triton's kernels call it by its name
        ...
    fence.gluon             # what Gluon's kernels call

The Gluon version is the same code with other globals: there ``tl`` is Gluon's language, and the name of a function or
class that was made here gives its Gluon version. Globals are looked up when a kernel is compiled, so a function may use
names that are defined below it. Where the two languages need different code, `gluon_version_of` registers Gluon's.
"""

from collections.abc import Callable, ItemsView, KeysView
from types import FunctionType
from typing import Any, cast

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris.compat.aggregate import aggregate as triton_aggregate

# (Triton's object, Gluon's version of it), by id() of the former: the language itself, functions, and classes.
_versions: dict[int, tuple[Any, Any]] = {id(tl): (tl, gl)}


def in_gluon(value: Any) -> Any:
    """The Gluon version of ``tl`` or of what was made here; any other value as it is."""
    return _versions.get(id(value), (value, value))[1]


class _GluonGlobals(dict):
    """The globals of a module as Gluon versions of its functions see them.

    It is a dict, as nothing else can be the globals of a function. Triton looks names up by the methods below. In the
    simulator Python itself does, at every use of a name, so `__missing__` stores what it has found.
    """

    def __init__(self, module: dict[str, Any]) -> None:
        super().__init__()
        self._module = module

    def __missing__(self, name: str) -> Any:
        value = self[name] = in_gluon(self._module[name])
        return value

    def get(self, name: str, default: Any = None) -> Any:
        return in_gluon(self._module[name]) if name in self._module else default

    def __contains__(self, name: object) -> bool:
        return name in self._module

    def __iter__(self) -> Any:
        return iter(self._module)

    def keys(self) -> KeysView:  # type: ignore[override]
        return self._module.keys()

    def items(self) -> ItemsView:  # type: ignore[override]
        return {name: in_gluon(value) for name, value in self._module.items()}.items()

    def __or__(self, others: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        return dict(self.items()) | others


# By module. One for all functions of a module, as Triton identifies a global by its name and the id of its dict.
_globals: dict[str, _GluonGlobals] = {}


def _over_gluon(function: Callable) -> FunctionType:
    """A function with the same code, and with Gluon's globals."""
    function = cast(FunctionType, function)
    over = _globals.setdefault(function.__module__, _GluonGlobals(function.__globals__))
    version = FunctionType(function.__code__, over, function.__name__, function.__defaults__, function.__closure__)
    version.__kwdefaults__, version.__annotations__ = function.__kwdefaults__, function.__annotations__
    version.__module__, version.__qualname__ = function.__module__, function.__qualname__
    version.__doc__ = function.__doc__
    return version


def jit(function: Callable | None = None, **options: Any) -> Any:
    """As ``triton.jit``, with the same options; the Gluon version is the attribute ``gluon`` of what it returns."""
    if function is None:
        return lambda function: jit(function, **options)
    version = triton.jit(function, **options)
    version.gluon = gluon.jit(_over_gluon(function), **options)
    # By this help() and `inspect.signature` show the arguments. Of what Triton returns they are ``*args, **kwargs``.
    version.__wrapped__ = version.gluon.__wrapped__ = function
    _versions[id(version)] = (version, version.gluon)
    return version


def gluon_jit(function: Callable | None = None, **options: Any) -> Any:
    """As ``gluon.jit``, for a kernel in ``gl``. It calls what was made here by its plain name, without ``.gluon``."""
    if function is None:
        return lambda function: gluon_jit(function, **options)
    return gluon.jit(_over_gluon(function), **options)


def gluon_version_of(version: Any) -> Callable[[Callable], Any]:
    """Decorate a function in ``gl``, which becomes the Gluon version of ``version``, made by ``triton.jit``."""

    def register(function: Callable) -> Any:
        version.gluon = gluon.jit(function)
        _versions[id(version)] = (version, version.gluon)
        return version.gluon

    return register


def aggregate(cls: type) -> type:
    """As ``triton.aggregate``, of a class whose methods are made by `jit`; `in_gluon` gives Gluon's version."""
    for name, member in vars(cls).items():
        # So that messages name a method by its class, also where its function is from another file.
        if hasattr(member, "gluon"):
            member.fn.__qualname__ = f"{cls.__name__}.{name}"
    hidden = ("__dict__", "__weakref__")
    members = {name: in_gluon(member) for name, member in vars(cls).items() if name not in hidden}
    annotations = {name: in_gluon(kind) for name, kind in cls.__annotations__.items()}
    in_triton = triton_aggregate(cls)
    version = triton_aggregate(type(cls.__name__, cls.__bases__, members | {"__annotations__": annotations}))
    _versions[id(in_triton)] = (in_triton, version)
    return in_triton
