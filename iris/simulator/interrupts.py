"""Ctrl-C, and other signals that end what the host does, while programs take turns.

An error that a signal's handler raises in the scheduler's bookkeeping would lose the baton, and with it every program.
So while a launch runs on the main thread, such an error only marks the launch as failed there (its programs then leave,
and the launch raises it), and is raised on the spot only in a program's own code.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType

# Those that programs handle. To ask for all of them takes as long as a small launch.
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)


@contextlib.contextmanager
def deferred(fail: Callable[[BaseException], None], program: CodeType) -> Iterator[None]:
    """While the block runs, pass to ``fail`` what handlers of signals raise; raise it only in what ``program`` calls.

    ``program`` is the code of the scheduler's function that runs a program. Does nothing off the main thread, where no
    handler runs.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    found = {number: each for number in _HANDLED if callable(each := signal.getsignal(number))}
    # The user's: in a launch by a program of another launch, those for which the outer one's handler stands.
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
