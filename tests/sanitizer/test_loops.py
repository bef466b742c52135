"""Which loops wait for memory, and which end by themselves: only the first may be a deadlock."""

import ast

import pytest

from iris.sanitizer import loops
from iris.simulator import spinning

SPINS = [
    "while tl.load(flag) != 1:\n    pass",
    "while ctx.atomic_add(flag, 0, peer, sem='acquire') < n + 1:\n    pass",
    "found = 0\nwhile found == 0:\n    found = tl.load(flag)",
    "found = 0\nwhile found < n:\n    seen = tl.load(flags + i)\n    found = tl.sum(seen)",
    "rounds = 0\nwhile not ready(flag):\n    rounds += 1",
]
ENDS = [
    "while key != tl.load(table + i):\n    i += 1",
    "while (tl.load(flag) != 1) & (rounds < 100):\n    rounds += 1",
    "while found < n:\n    for i in range(n):\n        if tl.load(flags + i) == 1:\n            found += 1",
    "while low < high:\n    middle = (low + high) // 2\n    if tl.load(x + middle) < key:\n        low = middle + 1\n"
    "    else:\n        high = middle",
    "while node != 0:\n    node = tl.load(following + node)",
]


def loop_of(source):
    return next(node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.While))


@pytest.mark.parametrize("source", SPINS)
def test_a_loop_that_nothing_ends_but_memory_spins(source):
    assert spinning.spins(loop_of(source))


@pytest.mark.parametrize("source", ENDS)
def test_a_loop_that_goes_on_by_itself_does_not(source):
    assert not spinning.spins(loop_of(source))


@pytest.mark.parametrize(
    ("test", "cmp"),
    [
        ("tl.load(f) != 1", "eq"),
        ("tl.load(f) < n", "ge"),
        ("n > ctx.atomic_add(f, 0, r)", "ge"),
        ("n == tl.load(f)", "ne"),
        ("tl.sum(tl.load(f)) < n", None),
        ("(tl.load(f) < n) & on", None),
    ],
)
def test_a_loop_ends_where_its_comparison_fails(test, cmp):
    found = spinning.comparison(loop_of(f"while {test}:\n    pass"))
    assert (found and found.cmp) == cmp


@pytest.mark.parametrize(
    ("source", "compares"),
    [
        ("while flag.item() < n:\n    sleep(other.item())", True),
        ("while n > flag.item():\n    pass", True),
        ("while flag.item() < n: sleep(other.item())", False),
        ("while flags[other.item()].item() < n:\n    pass", False),
        ("while on and flag.item() < n:\n    pass", False),
        ("while int(flag.item()) < n:\n    pass", False),
        ("if flag.item() < n:\n    pass", False),
    ],
)
def test_where_a_loop_of_the_host_compares_and_does_no_more(tmp_path, source, compares):
    file = tmp_path / "host.py"
    file.write_text(source)
    assert [loops.comparison_at(str(file), line) is not None for line in (1, 2)] == [compares, False]
