"""What a program does with what it sees of a flag: it waits for a value, or goes on by it."""

import ast
import functools
from types import CodeType, FrameType
from typing import Any

import triton.language as tl

from iris.sanitizer import loops
from iris.sanitizer.events import Wait
from iris.simulator import lines
from iris.simulator.dropped import dropped_calls
from iris.simulator.shapes import unwrapped


def wait_of(frame: FrameType | None) -> Wait | None:
    """For what a program polls that has got here: in a `DeviceContext.wait`, or in the condition of a loop of its own.

    None if the program uses the value for something else, too. Who goes on by the value that it has seen may count on
    that one.
    """
    while frame is not None and lines.owner(frame.f_code) == lines.OTHER:
        if frame.f_code.co_name == "wait" and frame.f_code.co_filename == lines.LANGUAGE + "ordering.py":
            return _of_the_language(frame)
        frame = frame.f_back
    condition = None if frame is None else loops.condition_at(frame.f_code.co_filename, frame.f_lineno)
    if frame is None or condition is None:
        return None
    wanted = _number(condition.wanted, frame)
    return None if wanted is None else Wait(condition.cmp, wanted, 64)


def _of_the_language(frame: FrameType) -> Wait | None:
    names, caller = frame.f_locals, frame.f_back
    while caller is not None and lines.owner(caller.f_code) == lines.OTHER:
        caller = caller.f_back
    if caller is None or caller.f_lasti not in dropped_calls(caller.f_code):
        return None
    wanted = names["wanted"]
    return Wait(unwrapped(names["cmp"]), int(wanted.handle.data.item()), wanted.dtype.primitive_bitwidth)


def _number(node: ast.expr, frame: FrameType) -> int | None:
    """The whole number that an expression is in this frame; None if it is none, or calls something to find out."""
    code = _calculation(node)
    if code is None:
        return None
    try:
        value: Any = unwrapped(eval(code, frame.f_globals, frame.f_locals))
    except Exception:  # the program will raise it, too
        return None
    if isinstance(value, tl.tensor) and not value.type.is_block() and value.dtype.is_int():
        return int(value.handle.data.item())
    return value if isinstance(value, int) else None


@functools.cache
def _calculation(node: ast.expr) -> CodeType | None:
    if any(isinstance(each, (ast.Call, ast.NamedExpr, ast.Subscript)) for each in ast.walk(node)):
        return None
    return compile(ast.Expression(node), "<what a loop waits for>", "eval")


def spins(frame: FrameType | None) -> bool:
    """Whether what is loaded here is all that a loop of the program waits for: the same again is no progress.

    So is not what the library looks up for itself, as where a peer's memory is.
    """
    while frame is not None and frame.f_code is not lines.BOTTOM:
        whose = lines.owner(frame.f_code)
        if whose == lines.OTHER:
            if frame.f_code.co_filename.startswith(lines.LANGUAGE) and frame.f_code.co_name != "load":
                return False
        elif whose != lines.LIBRARY and loops.spins_at(frame.f_code.co_filename, frame.f_lineno):
            return True
        frame = frame.f_back
    return False
