"""Ctrl-C, and other signals whose handlers raise an error, while a launch runs on the main thread.

Such an error must not be raised amid the scheduler's bookkeeping: the baton (`iris.simulator.grid`) would be lost, and
every thread would wait for it. So there the error only marks the launch as failed. Its programs then leave, and the
launch raises the error. In a program's own code it is raised on the spot.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType

# The signals that programs handle. To look at all that there are would take as long as a small launch.
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)


@contextlib.contextmanager
def deferred(fail: Callable[[BaseException], None], program: CodeType) -> Iterator[None]:
    """While this lasts, pass to ``fail`` what signal handlers raise. Raise it too if the signal came in a program.

    ``program``: the code of the scheduler's function that runs a program. On other threads than the main one this does
    nothing, as no handler runs there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    found = {number: each for number in _HANDLED if callable(each := signal.getsignal(number))}
    # The user's handlers. If a program of another launch launches this one, `found` has those of the outer launch.
    users = {number: getattr(each, "stands_for", {number: each})[number] for number, each in found.items()}

    def handler(number: int, frame: FrameType | None) -> None:
        try:
            users[signal.Signals(number)](number, frame)
            return
        except BaseException as raised:
            error = raised.with_traceback(None)
        fail(error)
        caller = frame
        while caller is not None and caller.f_code is not program:
            if caller.f_code.co_filename == program.co_filename:
                return
            caller = caller.f_back
        if caller is not None and caller is not frame:
            raise error

    handler.stands_for = users  # type: ignore[attr-defined]
    for number in found:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, before in found.items():
            if signal.getsignal(number) is handler:  # and not what a user's handler has set
                signal.signal(number, before)
