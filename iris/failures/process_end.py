"""Ends a process by an error that cannot be raised, as the main thread may wait in the driver for ever.

For `iris.failures.peer_loss` and `iris.failures.differing_calls`: each has a thread that prints what has happened, and
ends the process after a grace period. ``IRIS_PEER_LOST`` is read when Iris is imported: ``abort``, the default, or
``report``, with which the process is left to end by itself.
"""

import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch

from iris.errors import InvalidSettingError
from iris.world import farewell

VARIABLE = "IRIS_PEER_LOST"
# How long the program has to end, or to close what it shares, before it is ended.
GRACE_S = 10.0
# The time limit of telling the other ranks why this one ends, which may hang.
TELLING_S = 0.5

_LIBRARIES = (str(Path(__file__).parents[1]) + os.sep, str(Path(torch.__file__).parent) + os.sep)


def _aborts() -> bool:
    choice = os.environ.get(VARIABLE) or "abort"
    if choice not in ("abort", "report"):
        raise InvalidSettingError(VARIABLE, choice, f"abort (after {GRACE_S:g} s) or report")
    return choice == "abort"


ABORTS: bool = _aborts()
"""Whether the process ends after the grace."""


def end_by(error: Exception) -> None:
    """End this process: say why, and where the main thread is, here and to the other ranks. Does not return."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
    kind = type(error)
    say(f"The main thread is here:\n{stack}{kind.__module__}.{kind.__name__}: {error}")
    is_done(lambda: farewell.leave(f"{kind.__name__}: {error}"), TELLING_S)
    is_done(sys.stdout.flush, TELLING_S)
    os._exit(1)


def say(text: str) -> None:
    """Print on standard error, at once."""
    # Not through sys.stderr, whose lock the main thread may hold.
    os.write(2, f"[Iris] {text}\n".encode())


def is_done(work: Callable[[], None], limit_s: float) -> bool:
    """Do ``work`` in another thread, and return whether it is done within the limit.

    If not, the thread is left behind: nothing ends a call that waits for a hung kernel.
    """
    thread = threading.Thread(target=work, name="iris-process-end", daemon=True)
    thread.start()
    thread.join(limit_s)
    return not thread.is_alive()


def place() -> str:
    """The main thread's line in the user's program, and what it has called there: "at FILE:LINE in f(), in g()"."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    inner = frame
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES) and frame.f_back is not None:
        frame = frame.f_back
    if frame is None:
        return "in its end"
    called = "" if inner is None or inner is frame else f", in {_name(inner)}"
    return f"at {frame.f_code.co_filename}:{frame.f_lineno} in {_name(frame)}{called}"


def _name(frame: FrameType) -> str:
    return f"{frame.f_code.co_name}()"
