"""What a wait may count on: the first value of its flag that ends it, and not the one that it happens to see.

A count may have been raised further meanwhile. What came with those values was there by luck, and another time it is
not: a sender that waits for one credit too few sees them all, if its receiver is fast.
"""

import dis
import functools
import itertools
import operator
from collections import deque
from types import CodeType, FrameType
from typing import NamedTuple

import triton.language as tl

from iris.simulator.sanitizer import clocks, lines
from iris.simulator.sanitizer.clocks import Released, Thread

# So many values of a flag are remembered. Of a wait for an older one, the oldest of them counts.
REMEMBERED = 8

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


@functools.cache
def _unused(code: CodeType) -> frozenset[int]:
    """Where ``code`` calls something whose result it drops, caches that follow the instruction included."""
    instructions = list(dis.get_instructions(code))
    found = [(one, other) for one, other in itertools.pairwise(instructions) if other.opname == "POP_TOP"]
    return frozenset(offset for one, other in found for offset in range(one.offset, other.offset))


class _Value(NamedTuple):
    """``slot``, ``tick``: of who wrote it, see `clocks`; ``released``: with it, if anything."""

    value: int
    slot: int
    tick: int
    released: Released | None


class Flag:
    """The last values of a word; when one began to look, ``value``, with what was ``released``.

    ``state``: what else tells that it is the same, the numbers of its release and of who wrote it as data.
    """

    def __init__(self, value: int, released: Released | None, state: tuple[int, int]) -> None:
        self._values = deque([_Value(value, -1, 0, released)], REMEMBERED)
        self._state = state

    def holds(self, value: int, state: tuple[int, int]) -> bool:
        """Whether the word has been written by `write` alone. A host's copies are not, and have no place among values:
        when one of them is looked at, later ones may have been gone through already."""
        return self._values[-1].value == value and self._state == state

    def write(self, value: int, thread: Thread, released: Released | None, state: tuple[int, int]) -> None:
        self._values.append(_Value(value, thread.slot, thread.tick, released))
        self._state = state

    def ending(self, wait: Wait, thread: Thread) -> Released | None:
        """What ``thread`` may count on behind ``wait``."""
        first = None
        for each in reversed(self._values):
            if not wait.ends_at(each.value):
                break
            first = each
            if each.slot >= 0 and thread.knows(each.slot, each.tick)[clocks.AS_WRITTEN]:
                # It cannot see an older one.
                break
        return first and first.released
