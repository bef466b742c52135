"""Which lines of the host's source are in loops that may wait, that is, that end by what they see.

Found by the syntax tree of the file, once for each file.
"""

import ast
import functools
import linecache
from collections import Counter
from typing import NamedTuple, TypeGuard

from iris.simulator import spinning
from iris.simulator.parsing import parse


def is_in_wait(file: str, line: int) -> bool:
    """Whether this line is in a loop that ends by what it sees: ``while``, or ``for`` with a break."""
    return line in _loops(file).waits


def comparison_at(file: str, line: int) -> spinning.Comparison | None:
    """The condition of a loop that spins, if this line has its one ``item()``, which is only compared."""
    return _loops(file).comparisons.get(line)


def ends_wait_at(file: str, line: int) -> bool:
    """Whether this line decides whether such a loop ends: it is in the loop's condition, or in that of a break."""
    return line in _loops(file).ends


class _Loops(NamedTuple):
    waits: frozenset[int]
    ends: frozenset[int]
    comparisons: dict[int, spinning.Comparison]


@functools.cache
def _loops(file: str) -> _Loops:
    try:
        tree = parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):
        return _Loops(frozenset(), frozenset(), {})
    waits: set[int] = set()
    ends: set[int] = set()
    comparisons: dict[int, spinning.Comparison] = {}
    items: Counter[int] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.While):
            waits |= _lines_of(node)
            ends |= _lines_of(node.test) | _lines_of_breaks(node)
            if (comparison := spinning.comparison(node)) and _is_item(comparison.look.func):
                comparisons |= dict.fromkeys(_lines_of(comparison.look), comparison)
        elif isinstance(node, ast.For) and any(isinstance(each, ast.Break) for each in ast.walk(node)):
            waits |= _lines_of(node)
            ends |= _lines_of_breaks(node)
        elif _is_item(node):
            items.update(_lines_of(node))
    comparisons = {line: each for line, each in comparisons.items() if items[line] < 2}
    return _Loops(frozenset(waits), frozenset(ends), comparisons)


def _lines_of_breaks(loop: ast.While | ast.For) -> set[int]:
    """The lines of the conditions under which a loop is left by a break or return."""
    conditions = [node for node in ast.walk(loop) if isinstance(node, ast.If)]
    leaving = [node for node in conditions if any(isinstance(each, (ast.Break, ast.Return)) for each in node.body)]
    return set().union(*(_lines_of(node.test) for node in leaving))


def _is_item(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and node.attr == "item"


def _lines_of(node: ast.stmt | ast.expr) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
