"""Binds ``tl`` and ``gl`` to the simulator: every builtin then calls its semantic layer (`iris.simulator.semantic`).

A builtin of Triton takes the semantic layer as an argument, which the compiler passes. Triton's interpreter replaces
all builtins around each launch and each call of a device function. Here they are replaced once, when the simulator is
activated, in every module of the two languages. So kernels on several threads do not interfere, and it makes no
difference whether a program has imported the languages earlier.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from types import FunctionType
from typing import Any

import triton.language as tl
from triton import JITFunction

from iris.compat.gluon import replace_function_class
from iris.compat.interpreter import InterpretedFunction
from iris.compat.semantic import is_builtin
from iris.errors import NotInSimulatorError
from iris.simulator import (
    arithmetic,
    async_copy,
    libdevice,
    matrix_core,
    mbarrier,
    reductions,
    scaled,
    shapes,
    tma,
    warpgroup,
)
from iris.simulator.aggregates import method
from iris.simulator.interpreter import MissingOperation
from iris.simulator.kernels import GluonFunction
from iris.simulator.rewriting import counted
from iris.simulator.semantic import semantic
from iris.simulator.shapes import unwrapped

_LANGUAGES = ("triton.language", "triton.experimental.gluon.language")


def _same(value: Any, *_: Any, **__: Any) -> Any:
    return value


def _static_range(arg1: Any, arg2: Any = None, step: Any = None, **_: Any) -> range:
    first, second, step = (unwrapped(bound) for bound in (arg1, arg2, step))
    begin, end = (0, first) if second is None else (first, second)
    return range(begin, end, 1 if step is None else step)


def _static_assert(condition: Any, message: str = "") -> None:
    if not unwrapped(condition):
        raise AssertionError(unwrapped(message))


def _static_print(*values: Any, **options: Any) -> None:
    print(*values, **options)


def _replacements() -> dict[Any, Any]:
    """The replacements of builtins that the semantic layer alone does not make work, by the builtin."""
    replaced = {
        tl.reduce: reductions.reduce,
        tl.associative_scan: reductions.associative_scan,
        tl.range: counted,
        tl.static_range: _static_range,
        tl.condition: _same,
        tl.static_assert: _static_assert,
        tl.static_print: _static_print,
        tl.multiple_of: _same,
        tl.max_contiguous: _same,
        tl.max_constancy: _same,
        tl.map_elementwise: matrix_core.unavailable("map_elementwise"),
    }
    for unit in (matrix_core, mbarrier, async_copy, scaled, tma, warpgroup):
        replaced.update(unit.replacements())
    return replaced


def _bind(builtin: Callable) -> Callable:
    """``builtin`` with the simulator's semantic layer."""
    inner = getattr(builtin, "__wrapped__", builtin)  # without the check that the compiler calls it
    if not _takes_semantic(inner):
        return builtin

    @functools.wraps(builtin)
    def bound(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        try:
            return inner(*args, _semantic=semantic, **kwargs)
        except MissingOperation:
            raise NotInSimulatorError(builtin.__name__) from None

    return bound


def _without_compiler(replacement: Callable) -> Callable:
    """``replacement``, as other builtins call it: with the compiler's arguments, which it does not take."""

    @functools.wraps(replacement)
    def replaced(*args: Any, _semantic: Any = None, _generator: Any = None, **kwargs: Any) -> Any:
        return replacement(*args, **kwargs)

    return replaced


def _forwarding(fn: Callable) -> Callable:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return wrapper


# Triton wraps a builtin in a function that checks who calls it, and that closes over the builtin alone. This code takes
# the place of that function's code, and calls whatever the closure holds.
_FORWARDING = _forwarding(_same).__code__


def _is_unmarked_builtin(member: FunctionType) -> bool:
    """Whether this method is a builtin without being marked as one, as some of Gluon's are: it takes ``_semantic``."""
    return not member.__name__.startswith("_") and _takes_semantic(member)


def _takes_semantic(function: Callable) -> bool:
    code = inspect.unwrap(function).__code__  # `inspect.signature` takes ten times as long
    return "_semantic" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


class _Binder:
    """Finds the replacement of each object of the languages: always the same one, in all modules that have it."""

    def __init__(self) -> None:
        self._stand_ins = {original: _without_compiler(new) for original, new in _replacements().items()}
        self._functions: dict[FunctionType, InterpretedFunction] = {}
        self._classes: set[type] = set()

    def stand_in(self, value: Any) -> Any:
        """The replacement of ``value``, or ``value`` itself. The members of a class are replaced in place."""
        if isinstance(value, (JITFunction, InterpretedFunction)):
            if value.fn in self._stand_ins:
                return self._stand_ins[value.fn]
            if isinstance(value, JITFunction):
                return self._functions.setdefault(value.fn, InterpretedFunction(value.fn))
            return self._functions.setdefault(value.fn, value)
        if isinstance(value, type):
            if value in self._stand_ins:
                return self._stand_ins[value]
            if value.__module__.startswith(_LANGUAGES) and value not in self._classes:
                self._classes.add(value)
                self._bind_members(value)
        elif isinstance(value, FunctionType) and is_builtin(value):
            if value not in self._stand_ins:
                # Gluon takes over Triton's builtins by wrapping them.
                wrapped = getattr(value, "__wrapped__", None)
                self._stand_ins[value] = self.stand_in(wrapped) if is_builtin(wrapped) else _bind(value)
            return self._stand_ins[value]
        return value

    def forward(self) -> None:
        """Let the original builtins call their replacements: a program may have imported one by its name earlier."""
        for original, stand_in in self._stand_ins.items():
            if isinstance(original, FunctionType) and original.__code__.co_freevars == _FORWARDING.co_freevars:
                assert original.__closure__ is not None
                original.__closure__[0].cell_contents = stand_in
                original.__code__ = _FORWARDING

    def _bind_members(self, cls: type) -> None:
        for name, member in list(vars(cls).items()):
            if isinstance(member, (JITFunction, InterpretedFunction)):
                setattr(cls, name, method(self.stand_in(member)))
            elif isinstance(member, FunctionType) and (is_builtin(member) or _is_unmarked_builtin(member)):
                setattr(cls, name, _bind(member))


def install() -> None:
    """Bind both languages. Once for the life of the process."""
    for name in ("cuda", "hip", "libdevice"):
        import_module(f"triton.language.extra.{name}")
    binder = _Binder()
    modules = [module for name, module in sys.modules.items() if name.startswith(_LANGUAGES)]
    # All are looked up before any is replaced, as a builtin is recognised by what it wraps.
    changes = [
        (module, name, new)
        for module in modules
        for name, value in list(vars(module).items())
        if (new := binder.stand_in(value)) is not value
    ]
    for module, name, new in changes:
        setattr(module, name, new)
    binder.forward()
    libdevice.install()
    shapes.install()
    arithmetic.install()
    replace_function_class(GluonFunction)
    _install_tensor()
    _install_constexpr()
    tl.dtype.to_ir = lambda self, builder: self
    # Layouts are ignored, so a block has none; Gluon's zeros_like and the like pass it on.
    tl.block_type.layout = None


def _install_constexpr() -> None:
    """Let an operator between a global constant and a tensor be the tensor's, as the compiler does."""

    def leaving_tensors(operator: Callable) -> Callable:
        @functools.wraps(operator)
        def result(self: Any, other: Any) -> Any:
            return NotImplemented if isinstance(other, tl.tensor) else operator(self, other)

        return result

    arithmetic = ("add", "sub", "mul", "truediv", "floordiv", "mod", "lshift", "rshift", "and", "or", "xor")
    comparisons = ("lt", "le", "gt", "ge", "eq", "ne")
    for name in (*arithmetic, *comparisons):
        operator = f"__{name}__"
        setattr(tl.constexpr, operator, leaving_tensors(getattr(tl.constexpr, operator)))


def _install_tensor() -> None:
    """Add what Python needs of a tensor and the compiler does not: its truth value, its value as an index, its text."""
    tensor = tl.tensor
    # A block is true: the semantic layer asks ``if mask`` to find out whether there is one.
    tensor.__bool__ = lambda self: bool(self.handle.data.reshape(-1)[0]) if self.handle.data.size == 1 else True
    tensor.__index__ = lambda self: int(self.handle.data.reshape(-1)[0])
    tensor.__repr__ = lambda self: repr(self.handle.data)
    tensor.__str__ = lambda self: str(self.handle.data)
    tensor.T = property(lambda self: tl.trans(self))
    for name in ("reduce", "associative_scan"):
        setattr(tensor, name, getattr(tl, name))
