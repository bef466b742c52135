"""Which loops of a source spin: their condition can change by nothing but memory.

What the condition uses, a round finds as the round before has, unless somebody has written meanwhile. A loop that
counts its rounds in the condition ends by itself.
"""

import ast
from collections.abc import Iterator
from typing import NamedTuple

# How a loop ends that goes on while this holds.
_ENDS = {ast.NotEq: "eq", ast.Eq: "ne", ast.Lt: "ge", ast.LtE: "gt", ast.Gt: "le", ast.GtE: "lt"}

# The same comparison with its sides turned.
_TURNED = {ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE}

# What returns the value that it has found in memory.
_ATOMICS = ("add", "and", "cas", "max", "min", "or", "xchg", "xor")
_LOOKS = ("load", *(f"atomic_{name}" for name in _ATOMICS), "item")


class Comparison(NamedTuple):
    """That of a loop which ends when what it looks at compares as ``cmp`` to ``wanted``."""

    look: ast.Call
    cmp: str
    wanted: ast.expr


def comparison(loop: ast.While) -> Comparison | None:
    """The loop's condition, if the loop spins, and this compares one look with what can be computed at any time."""
    found = _comparison(loop.test)
    return found if found is not None and _is_plain(found.wanted) and spins(loop) else None


def _comparison(test: ast.expr) -> Comparison | None:
    match test:
        case ast.Compare(ast.Call() as look, [op], [wanted]) if _is_look(look):
            cmp = _ENDS.get(type(op))
        case ast.Compare(wanted, [op], [ast.Call() as look]) if _is_look(look):
            cmp = _ENDS.get(_TURNED.get(type(op), type(op)))
        case _:
            return None
    return None if cmp is None else Comparison(look, cmp, wanted)


def _is_look(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr in _LOOKS


def _is_plain(node: ast.expr) -> bool:
    """Whether computing this once more does no harm."""
    return not any(isinstance(each, (ast.Call, ast.NamedExpr, ast.Subscript)) for each in ast.walk(node))


def spins(loop: ast.While) -> bool:
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
