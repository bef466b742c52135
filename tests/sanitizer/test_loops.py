"""Which loops of a kernel's source wait for memory, and which end by themselves: only the first may be a deadlock."""

import textwrap

import pytest

from iris.sanitizer import loops

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


def spinning_lines(tmp_path, source):
    file = tmp_path / "kernel.py"
    file.write_text("def kernel():\n" + textwrap.indent(source, "    "))
    return [number for number in range(1, 9) if loops.spins_at(str(file), number)], file


@pytest.mark.parametrize("source", SPINS)
def test_a_loop_that_nothing_ends_but_memory_spins(tmp_path, source):
    lines, _ = spinning_lines(tmp_path, source)
    assert lines


@pytest.mark.parametrize("source", ENDS)
def test_a_loop_that_goes_on_by_itself_does_not(tmp_path, source):
    lines, _ = spinning_lines(tmp_path, source)
    assert lines == []


@pytest.mark.parametrize(
    "test, cmp",
    [("tl.load(f) != 1", "eq"), ("tl.load(f) < n", "ge"), ("n > ctx.atomic_add(f, 0, r)", "ge"),
     ("n == tl.load(f)", "ne"), ("tl.sum(tl.load(f)) < n", None), ("(tl.load(f) < n) & on", None)],
)  # fmt: skip
def test_a_loop_ends_where_its_comparison_fails(tmp_path, test, cmp):
    _, file = spinning_lines(tmp_path, f"while {test}:\n    pass")
    found = [loops.comparison_at(str(file), line) for line in (2, 3)]
    assert [comparison and comparison.cmp for comparison in found] == [cmp, None]
