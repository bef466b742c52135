"""The loops of a program's source that wait: a host's, which ends by what it sees, and a kernel's, which spins.

A kernel's loop *spins* if its condition can change by nothing but memory: what the condition uses, a round finds as the
round before has, unless somebody has written meanwhile. A loop that counts its rounds in the condition ends by itself.
"""

import ast
import functools
import linecache
from collections.abc import Iterator
from typing import NamedTuple

# How a loop ends that goes on while this holds.
_ENDS = {ast.NotEq: "eq", ast.Eq: "ne", ast.Lt: "ge", ast.LtE: "gt", ast.Gt: "le", ast.GtE: "lt"}

# The same comparison with its sides turned.
_TURNED = {ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE}

# What returns the value that it has found in memory.
_ATOMICS = ("add", "and", "cas", "max", "min", "or", "xchg", "xor")
_LOOKS = ("load", *(f"atomic_{name}" for name in _ATOMICS), "item")


class Condition(NamedTuple):
    """Of a loop that spins: it ends when the value that it looks at compares as ``cmp`` to ``wanted``."""

    cmp: str
    wanted: ast.expr


def is_in_wait(file: str, line: int) -> bool:
    """Whether this line of the host's is in a loop that ends by what it sees: ``while``, or ``for`` with a break."""
    return line in _loops(file).waits


def spins_at(file: str, line: int) -> bool:
    """Whether this line is in a loop that spins, of a kernel."""
    return line in _loops(file).spins


def condition_at(file: str, line: int) -> Condition | None:
    """That of the loop that spins in whose condition this line is, if it compares what one look has found."""
    return _loops(file).conditions.get(line)


def ends_wait_at(file: str, line: int) -> bool:
    """Whether such a loop ends by what this line gives: it is in its condition, or in that of its break."""
    return line in _loops(file).ends


class _Loops(NamedTuple):
    waits: frozenset[int]
    ends: frozenset[int]
    spins: frozenset[int]
    conditions: dict[int, Condition]


@functools.cache
def _loops(file: str) -> _Loops:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):
        return _Loops(frozenset(), frozenset(), frozenset(), {})
    waits: set[int] = set()
    ends: set[int] = set()
    spins: set[int] = set()
    conditions: dict = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.While):
            waits |= _lines_of(node)
            ends |= _lines_of(node.test) | _lines_of_breaks(node)
            if _spins(node):
                spins |= _lines_of(node)
                conditions |= _conditions(node.test)
        elif isinstance(node, ast.For) and any(isinstance(each, ast.Break) for each in ast.walk(node)):
            waits |= _lines_of(node)
            ends |= _lines_of_breaks(node)
    return _Loops(frozenset(waits), frozenset(ends), frozenset(spins), conditions)


def _lines_of_breaks(loop: ast.While | ast.For) -> set[int]:
    """Of the conditions that the breaks and returns in a loop are under."""
    conditions = [node for node in ast.walk(loop) if isinstance(node, ast.If)]
    leaving = [node for node in conditions if any(isinstance(each, (ast.Break, ast.Return)) for each in node.body)]
    return set().union(*(_lines_of(node.test) for node in leaving))


def _conditions(test: ast.expr) -> dict[int, Condition]:
    """The condition in this test of a loop, by the lines of the look, if it is a comparison of one look."""
    match test:
        case ast.Compare(ast.Call() as look, [op], [wanted]) if _is_look(look):
            cmp = _ENDS.get(type(op))
        case ast.Compare(wanted, [op], [ast.Call() as look]) if _is_look(look):
            cmp = _ENDS.get(_TURNED.get(type(op), type(op)))
        case _:
            return {}
    return {} if cmp is None else dict.fromkeys(_lines_of(look), Condition(cmp, wanted))


def _is_look(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr in _LOOKS


def _lines_of(node: ast.stmt | ast.expr) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def _spins(loop: ast.While) -> bool:
    """Whether no name that the condition depends on depends on itself, from one round to the next."""
    depends: dict[str, set[str]] = {}
    for target, names in _assignments(loop.body, set()):
        depends.setdefault(target, set()).update(names)
    if any(isinstance(each, (ast.Break, ast.Return)) for each in ast.walk(loop)):
        return False
    reached, new = set(), _names(loop.test)
    while new:
        reached |= new
        new = set().union(*(depends.get(name, ()) for name in new)) - reached
    return not any(name in _closure(depends, name) for name in reached)


def _closure(depends: dict[str, set[str]], name: str) -> set[str]:
    found: set[str] = set()
    new = depends.get(name, set())
    while new:
        found = found | new
        new = set().union(*(depends.get(each, ()) for each in new)) - found
    return found


def _assignments(body: list[ast.stmt], given: set[str]) -> Iterator[tuple[str, set[str]]]:
    """Each name that is assigned, and those that its value depends on. ``given``: those that decide whether it is."""
    for node in body:
        match node:
            case ast.Assign(targets=targets, value=value):
                yield from ((name, _names(value) | given) for target in targets for name in _names(target))
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                yield from ((name, _names(value) | given) for name in _names(target))
            case ast.AugAssign(target=target, value=value):
                yield from ((name, _names(value) | _names(target) | given) for name in _names(target))
            case ast.For(target=target, iter=each):
                yield from ((name, _names(each) | given) for name in _names(target))
                yield from _assignments(node.body, given | _names(each))
            case ast.If(test=test) | ast.While(test=test):
                yield from _assignments([*node.body, *node.orelse], given | _names(test))
    for node in body:
        for inner in ast.walk(node):
            if isinstance(inner, ast.NamedExpr):
                yield inner.target.id, _names(inner.value) | given


def _names(node: ast.expr) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
