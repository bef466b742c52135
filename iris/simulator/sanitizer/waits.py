"""What a program does with what it sees of a flag: it waits for a value, goes on by it, or drops it."""

import ast
import dis
import functools
import itertools
import linecache
import operator
from types import CodeType, FrameType
from typing import NamedTuple

import triton.language as tl

from iris.simulator.sanitizer import lines

_COMPARISONS = {name: getattr(operator, name) for name in ("eq", "ne", "gt", "ge", "lt", "le")}


class Wait(NamedTuple):
    """For a flag of so many bits that compares as ``cmp`` to ``wanted``, see `DeviceContext.wait`."""

    cmp: str
    wanted: int
    bits: int

    def ends_at(self, value: int) -> bool:
        if self.cmp == "reached":
            return (value - self.wanted) % (1 << self.bits) < 1 << (self.bits - 1)
        return _COMPARISONS[self.cmp](value, self.wanted)


def wait_of(frame: FrameType | None) -> Wait | None:
    """For what a program polls that has got here; None if not in a `DeviceContext.wait` whose value nobody uses.

    Who goes on by the value that it has seen may count on that one.
    """
    while frame is not None and lines.owner(frame.f_code) == lines.OTHER:
        if frame.f_code.co_name == "wait" and frame.f_code.co_filename == lines.LANGUAGE + "ordering.py":
            break
        frame = frame.f_back
    else:
        return None
    names, caller = frame.f_locals, frame.f_back
    while caller is not None and lines.owner(caller.f_code) == lines.OTHER:
        caller = caller.f_back
    if caller is None or caller.f_lasti not in _unused(caller.f_code):
        return None
    wanted = names["wanted"]
    return Wait(
        tl.core._unwrap_if_constexpr(names["cmp"]), int(wanted.handle.data.item()), wanted.dtype.primitive_bitwidth
    )


def is_dropped(frame: FrameType | None) -> bool:
    """Whether nobody uses what the operation returns that a program does here: it cannot go on by what it sees."""
    while frame is not None:
        whose = lines.owner(frame.f_code)
        if whose != lines.OTHER or frame.f_code.co_filename.startswith(lines.LANGUAGE):
            if frame.f_lasti in _unused(frame.f_code):
                return True
            if whose != lines.OTHER or frame.f_lasti not in _returned(frame.f_code):
                return False
        frame = frame.f_back
    return False


@functools.cache
def _unused(code: CodeType) -> frozenset[int]:
    """Where ``code`` calls something whose result it drops, caches that follow the instruction included."""
    return _followed_by("POP_TOP", code)


@functools.cache
def _returned(code: CodeType) -> frozenset[int]:
    """Where it returns the result as it is."""
    return _followed_by("RETURN_VALUE", code)


def _followed_by(name: str, code: CodeType) -> frozenset[int]:
    instructions = list(dis.get_instructions(code))
    found = [(one, other) for one, other in itertools.pairwise(instructions) if other.opname == name]
    return frozenset(offset for one, other in found for offset in range(one.offset, other.offset))


def is_in_wait(code: CodeType, line: int) -> bool:
    """Whether this line of the host's is in a loop that ends by what it sees: ``while``, or ``for`` with a break."""
    return line in _lines_of_waits(code.co_filename)


@functools.cache
def _lines_of_waits(file: str) -> frozenset[int]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):
        return frozenset()
    loops = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.While)
        or (isinstance(node, ast.For) and any(isinstance(each, ast.Break) for each in ast.walk(node)))
    ]
    return frozenset(line for loop in loops for line in range(loop.lineno, (loop.end_lineno or loop.lineno) + 1))
