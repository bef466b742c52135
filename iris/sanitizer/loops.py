"""The lines of a program's source that are in loops which wait: a host's, which ends by what it sees, and a kernel's,
which spins.
"""

import ast
import functools
import linecache
from typing import NamedTuple

from iris.simulator import spinning
from iris.simulator.parsing import parse


def is_in_wait(file: str, line: int) -> bool:
    """Whether this line of the host's is in a loop that ends by what it sees: ``while``, or ``for`` with a break."""
    return line in _loops(file).waits


def spins_at(file: str, line: int) -> bool:
    """Whether this line is in a loop that spins, of a kernel."""
    return line in _loops(file).spins


def comparison_at(file: str, line: int) -> spinning.Comparison | None:
    """That of the loop that spins in whose condition this line is, if it compares what one look has found."""
    return _loops(file).comparisons.get(line)


def ends_wait_at(file: str, line: int) -> bool:
    """Whether such a loop ends by what this line gives: it is in its condition, or in that of its break."""
    return line in _loops(file).ends


class _Loops(NamedTuple):
    waits: frozenset[int]
    ends: frozenset[int]
    spins: frozenset[int]
    comparisons: dict[int, spinning.Comparison]


@functools.cache
def _loops(file: str) -> _Loops:
    try:
        tree = parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):
        return _Loops(frozenset(), frozenset(), frozenset(), {})
    waits: set[int] = set()
    ends: set[int] = set()
    spins: set[int] = set()
    comparisons: dict = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.While):
            waits |= _lines_of(node)
            ends |= _lines_of(node.test) | _lines_of_breaks(node)
            if spinning.spins(node):
                spins |= _lines_of(node)
            if comparison := spinning.comparison(node):
                comparisons |= dict.fromkeys(_lines_of(comparison.look), comparison)
        elif isinstance(node, ast.For) and any(isinstance(each, ast.Break) for each in ast.walk(node)):
            waits |= _lines_of(node)
            ends |= _lines_of_breaks(node)
    return _Loops(frozenset(waits), frozenset(ends), frozenset(spins), comparisons)


def _lines_of_breaks(loop: ast.While | ast.For) -> set[int]:
    """Of the conditions that the breaks and returns in a loop are under."""
    conditions = [node for node in ast.walk(loop) if isinstance(node, ast.If)]
    leaving = [node for node in conditions if any(isinstance(each, (ast.Break, ast.Return)) for each in node.body)]
    return set().union(*(_lines_of(node.test) for node in leaving))


def _lines_of(node: ast.stmt | ast.expr) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
