"""Streams of the simulator: calls on a stream run one after the other, in threads beside the host's.

They are for messages of `iris.distributed`: two ranks may both receive before they send, so the host must go on. Other
calls need no stream. They run in the thread that makes them, since a collective ends once all ranks have called it.
"""

import threading
from collections.abc import Callable


class Enqueued:
    """A call that runs in a thread of its own, after the one ``before`` it, if there is one."""

    def __init__(self, call: Callable[[], None], before: "Enqueued | None" = None) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(call, before), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the call has ended, and raise what it raised."""
        self.synchronize()
        if self._error is not None:
            raise self._error

    def synchronize(self) -> None:
        """Wait until the call has ended, with an error or without."""
        self._thread.join()

    def is_over(self) -> bool:
        """Whether the call has ended, with an error or without."""
        return not self._thread.is_alive()

    def _run(self, call: Callable[[], None], before: "Enqueued | None") -> None:
        if before is not None:
            before.synchronize()
        try:
            call()
        except BaseException as error:
            self._error = error


class Stream:
    """Calls that run one after the other."""

    def __init__(self) -> None:
        self._last: Enqueued | None = None

    def enqueue(self, call: Callable[[], None]) -> Enqueued:
        """Run ``call`` when the calls before it are over."""
        self._last = Enqueued(call, self._last)
        return self._last

    def synchronize(self) -> None:
        """Wait until the calls so far have ended, with errors or without."""
        if self._last is not None:
            self._last.synchronize()
