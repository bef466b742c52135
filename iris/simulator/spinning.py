"""Which ``while`` loops of a source *spin*, that is, can end only if somebody else changes memory.

In a loop that spins, the condition depends on no variable that changes from one round to the next by itself. A loop
that counts its rounds in the condition does not spin: it ends by itself. The simulator asks this of kernels, and the
sanitizer of the host's Python as well.
"""

import ast
from collections.abc import Iterator
from typing import NamedTuple

# By the comparison in a loop's condition: the one that ends the loop.
_ENDS = {ast.NotEq: "eq", ast.Eq: "ne", ast.Lt: "ge", ast.LtE: "gt", ast.Gt: "le", ast.GtE: "lt"}

# The same comparison with its sides swapped.
_SWAPPED = {ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE}

# The names of functions that return what they have found in memory: *looks*.
_ATOMICS = ("add", "and", "cas", "max", "min", "or", "xchg", "xor")
_LOOKS = ("load", *(f"atomic_{name}" for name in _ATOMICS), "item")


class Comparison(NamedTuple):
    """The condition of a loop that ends when the value of ``look`` compares as ``cmp`` to ``wanted``."""

    look: ast.Call
    cmp: str
    wanted: ast.expr


def comparison(loop: ast.While) -> Comparison | None:
    """The condition of a loop that spins, if it compares one look with what may be computed once more."""
    found = _comparison(loop.test)
    return found if found is not None and _is_plain(found.wanted) and spins(loop) else None


def _comparison(test: ast.expr) -> Comparison | None:
    match test:
        case ast.Compare(ast.Call() as look, [op], [wanted]) if _is_look(look):
            cmp = _ENDS.get(type(op))
        case ast.Compare(wanted, [op], [ast.Call() as look]) if _is_look(look):
            cmp = _ENDS.get(_SWAPPED.get(type(op), type(op)))
        case _:
            return None
    return None if cmp is None else Comparison(look, cmp, wanted)


def _is_look(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr in _LOOKS


def _is_plain(node: ast.expr) -> bool:
    """Whether it does no harm to compute this once more: it calls nothing and assigns nothing."""
    return not any(isinstance(each, (ast.Call, ast.NamedExpr, ast.Subscript)) for each in ast.walk(node))


def spins(loop: ast.While) -> bool:
    """Whether only memory can end the loop: no variable in its condition depends on its own value of a round before.

    A loop with a ``break`` or ``return`` may end otherwise.
    """
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
    """All names that ``name`` depends on, directly or not."""
    found: set[str] = set()
    new = depends.get(name, set())
    while new:
        found = found | new
        new = set().union(*(depends.get(each, ()) for each in new)) - found
    return found


def _assignments(body: list[ast.stmt], given: set[str]) -> Iterator[tuple[str, set[str]]]:
    """Each name that is assigned, with the names on which its value depends.

    ``given``: the names in conditions around it, which decide whether it is assigned.
    """
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
