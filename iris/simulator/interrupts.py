"""Ctrl-C while programs take turns.

An interrupt that is raised in the scheduler's bookkeeping would lose the baton, and with it every program. So while a
launch runs on the main thread, an interrupt only marks the launch as failed there (its programs then leave, and the
launch raises it), and is raised on the spot only in a program's own code.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType


@contextlib.contextmanager
def deferred(fail: Callable[[BaseException], None], program: CodeType) -> Iterator[None]:
    """While the block runs, pass interrupts to ``fail``; raise them only in what ``program`` calls.

    ``program`` is the code of the scheduler's function that runs a program. Does nothing off the main thread, where no
    interrupt arrives, or where the user has a handler of their own.
    """
    if threading.current_thread() is not threading.main_thread() or not _ours(signal.getsignal(signal.SIGINT)):
        yield
        return

    def handler(signum: int, frame: FrameType | None) -> None:
        interrupt = KeyboardInterrupt()
        fail(interrupt)
        caller = frame
        while caller is not None and caller.f_code is not program:
            if caller.f_code.co_filename == program.co_filename:
                return
            caller = caller.f_back
        if caller is not None and caller is not frame:
            raise interrupt

    handler.defers_interrupts = True  # type: ignore[attr-defined]
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _ours(handler: object) -> bool:
    return handler is signal.default_int_handler or hasattr(handler, "defers_interrupts")
