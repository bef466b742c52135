"""Whether a program uses what an operation returns, such as the former value of a flag: its bytecode shows that."""

import dis
import functools
import itertools
from types import CodeType, FrameType

from iris.simulator import lines


def is_dropped(frame: FrameType | None) -> bool:
    """Whether nobody uses what the operation returns that a program does here: it cannot go on by what it sees."""
    while frame is not None:
        whose = lines.owner(frame.f_code)
        if whose != lines.OTHER or frame.f_code.co_filename.startswith(lines.LANGUAGE):
            if frame.f_lasti in dropped_calls(frame.f_code):
                return True
            # A function of the language that uses what it has found returns it, and does no more with it itself.
            if whose != lines.OTHER:
                return False
        frame = frame.f_back
    return False


@functools.cache
def dropped_calls(code: CodeType) -> frozenset[int]:
    """Where ``code`` calls something whose result it drops, caches that follow the instruction included."""
    instructions = list(dis.get_instructions(code))
    found = [(one, other) for one, other in itertools.pairwise(instructions) if other.opname == "POP_TOP"]
    return frozenset(offset for one, other in found for offset in range(one.offset, other.offset))
