"""A stream of the simulator: what is enqueued on it runs in turn, beside what the host goes on to do.

Other calls run in the thread that makes them, since a collective that all ranks call ends by itself. A message does
not: two ranks may both receive before they send.
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
        """Return when it is over; raises what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def is_over(self) -> bool:
        """Whether it has ended, with an error or without."""
        return not self._thread.is_alive()

    def _run(self, call: Callable[[], None], before: "Enqueued | None") -> None:
        if before is not None:
            before._thread.join()
        try:
            call()
        except BaseException as error:
            self._error = error


class Stream:
    """Calls that follow each other."""

    def __init__(self) -> None:
        self._last: Enqueued | None = None

    def enqueue(self, call: Callable[[], None]) -> Enqueued:
        """Run ``call`` when the calls before it are over."""
        self._last = Enqueued(call, self._last)
        return self._last
