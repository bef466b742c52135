"""Whether a read of a flag is part of a wait, and for which value."""

import ast
import functools
from types import CodeType, FrameType

from iris.sanitizer import loops
from iris.sanitizer.events import Wait
from iris.simulator import lines, tasks


def wait_of_program() -> Wait | None:
    """The wait that the program's read is part of: a `DeviceContext.wait`, or a loop with the read in its condition.

    None if the program uses the value, too: then it may rely on this very value, and not only on the wait.
    """
    task = tasks.current()
    condition = task.condition
    if condition is None or condition.ranks is not None or (condition.returned and not task.dropped):
        return None
    return Wait(condition.cmp, condition.wanted, condition.bits)


def wait_of_host(frame: FrameType | None) -> Wait | None:
    """The wait that the host's read is part of: the condition of a loop, as in ``while flag.item() < awaited``.

    This is the only place where Iris reads a program's variables: the sanitizer sees the read, but not with what the
    program compares the value. Without that, a host that waits for the first of three chunks and reads the third would
    pass whenever all three have come. It is no way out to replace `torch.Tensor.item` by a function whose result sees
    the comparison: torch.compile cannot trace that function with ``fullgraph=True``.
    """
    while frame is not None and lines.owner(frame.f_code) == lines.INTERNAL:
        frame = frame.f_back
    comparison = None if frame is None else loops.comparison_at(frame.f_code.co_filename, frame.f_lineno)
    if frame is None or comparison is None:
        return None
    try:
        wanted = eval(_calculation(comparison.wanted), frame.f_globals, frame.f_locals)
    except Exception:  # the loop's own comparison will raise it, too
        return None
    return Wait(comparison.cmp, wanted, 64) if isinstance(wanted, int) else None


@functools.cache
def _calculation(node: ast.expr) -> CodeType:
    return compile(ast.Expression(node), "<what a loop waits for>", "eval")
