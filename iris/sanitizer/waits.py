"""What a program does with what it sees of a flag: it waits for a value, or goes on by it."""

import ast
import functools
from types import CodeType, FrameType

from iris.sanitizer import loops
from iris.sanitizer.events import Wait
from iris.simulator import lines, tasks


def wait_of_program() -> Wait | None:
    """For what the program that runs polls: in a `DeviceContext.wait`, or in the condition of a loop of its own.

    None if it uses the value for something else, too. Who goes on by the value that it has seen may count on that one.
    """
    task = tasks.current()
    condition = task.condition
    if condition is None or condition.ranks is not None or (condition.returned and not task.dropped):
        return None
    return Wait(condition.cmp, condition.wanted, condition.bits)


def wait_of_host(frame: FrameType | None) -> Wait | None:
    """For what the host polls in the condition of a loop, from ``frame`` on, as in ``while flag.item() < awaited``.

    This is the only place where Iris reads a program's variables: the sanitizer sees the look, but not what the program
    compares the value with. Without that, a host that waits for the first of three chunks and reads the third would
    pass whenever all three have come. Replacing `torch.Tensor.item` by a function whose result sees the comparison is
    no way out: torch.compile cannot trace that function with ``fullgraph=True``.
    """
    while frame is not None and lines.owner(frame.f_code) == lines.INTERNAL:
        frame = frame.f_back
    comparison = None if frame is None else loops.comparison_at(frame.f_code.co_filename, frame.f_lineno)
    if frame is None or comparison is None:
        return None
    try:
        wanted = eval(_calculation(comparison.wanted), frame.f_globals, frame.f_locals)
    except Exception:  # the program will raise it, too
        return None
    return Wait(comparison.cmp, wanted, 64) if isinstance(wanted, int) else None


@functools.cache
def _calculation(node: ast.expr) -> CodeType:
    return compile(ast.Expression(node), "<what a loop waits for>", "eval")
