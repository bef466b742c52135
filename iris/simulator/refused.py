"""What Triton's compiler refuses of the Python in a kernel, and a Python interpreter would do.

A program that was written without a GPU is to compile on one. So in rewritten code (`iris.simulator.rewriting`) such
places raise. They do when they are reached: the compiler, too, looks at no branch that a constexpr condition excludes.
That both branches of a condition give a variable the same type is not seen here, where only one of them runs.
"""

import ast
from types import FunctionType
from typing import Any, NoReturn

import numpy as np
import torch
import triton
import triton.language as tl

from iris.compat.semantic import is_compiled
from iris.simulator.lines import USER, owner_of

# Values that a kernel's globals may have for its host code. Classes and modules, for example, are something else.
_OF_THE_HOST = (bool, int, float, complex, str, list, dict, set, np.generic, np.ndarray, torch.Tensor, torch.dtype)


def construct(node: ast.AST, in_loop: bool) -> str | None:
    """The text of what the compiler has no rule for; None if it has one. ``in_loop``: within a loop of the kernel."""
    if isinstance(node, ast.Return) and in_loop:
        return "a return within a loop"
    # Parts of others: of calls, and of f-strings.
    if not isinstance(node, (ast.stmt, ast.expr)) or isinstance(node, (ast.Starred, ast.FormattedValue)):
        return None
    return None if is_compiled(node) else ast.unparse(node).splitlines()[0]


def refuse_construct(what: str) -> NoReturn:
    raise TypeError(f"Triton compiles no such statement or expression: {what}")


def globals_of_the_host(function: FunctionType) -> frozenset[str]:
    """The names of globals, and of variables of functions around it, that the compiler does not let a kernel read."""
    if triton.knobs.compilation.allow_non_constexpr_globals:
        return frozenset()
    found = {name: function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # it has no value yet
            continue
    return frozenset(name for name, value in found.items() if _is_of_the_host(value))


def _is_of_the_host(value: Any) -> bool:
    if isinstance(value, FunctionType):
        return owner_of(value.__code__.co_filename) == USER  # builtins of the language are functions, too
    return isinstance(value, _OF_THE_HOST) or type(value) is tuple


def refuse_global(name: str, value: Any) -> NoReturn:
    if isinstance(value, FunctionType):
        raise TypeError(f"A kernel uses {name}(), which does not compile: decorate it with triton.jit or gluon.jit.")
    raise TypeError(
        f"A kernel reads the global {name}, which does not compile: make it a constant, {name} = tl.constexpr(...), or "
        "pass it as an argument."
    )


def condition(value: Any) -> Any:
    """The condition of an ``if`` or ``while``."""
    if isinstance(value, tl.tensor) and value.type.is_block() and value.numel.value != 1:
        raise TypeError(
            f"A condition on a block of {value.numel.value} elements does not compile: use masks and tl.where(), or "
            "reduce it to one value."
        )
    return value


def types_of(variables: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """The types of those ``names`` that stand for tensors before a loop, which assigns to them."""
    return {name: value.type for name in names if isinstance(value := variables.get(name), tl.tensor)}


def check_carried(variables: dict[str, Any], before: dict[str, Any]) -> None:
    """At the end of a round of a loop: refuse a variable of another type than ``before`` the loop."""
    for name, was in before.items():
        value = variables[name]
        if isinstance(value, tl.tensor) and value.type is not was and value.type != was:
            raise TypeError(
                f"{name} is {was} before a loop and {value.type} after a round of it, which does not compile: give it "
                f"one type, as by {name}.to(...)."
            )
