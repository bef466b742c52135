"""Asynchronous calls of the host: those of torch with ``async_op=True``, and tasks of executors.

Such a call is like a thread that the caller starts, and that a wait for the call joins. So it comes after what was done
before it was made. It is unordered with what is done from then on until somebody has waited for it. Calls that have the
same number come one after the other.
"""

import contextlib
from collections.abc import Iterator
from typing import Protocol

from iris.sanitizer.event_log import EventLog
from iris.sanitizer.events import HostAcquire, HostRelease


class _Threads(Protocol):
    """The part of `iris.sanitizer.threads.Threads` that calls use. ``calls``: those that nobody has waited for."""

    calls: "set[Call]"

    def current(self) -> int: ...
    def new_number(self) -> int: ...
    def carrying_out(self, call: "Call") -> contextlib.AbstractContextManager[None]: ...
    def free(self, number: int) -> None: ...


class Call:
    """A call, made now. ``place``: the number of the line that made it, to which all that it does is put down.

    If it is None, the call runs code of the program's, which has lines of its own.
    """

    def __init__(self, threads: _Threads, log: EventLog, number: int, place: int | None) -> None:
        self.number, self.place = number, place
        self._threads, self._log = threads, log
        self._begun, self._over = threads.new_number(), threads.new_number()
        log.add(HostRelease(threads.current(), self._begun))
        threads.calls.add(self)

    @contextlib.contextmanager
    def carried_out(self) -> Iterator[None]:
        """While this lasts the current thread carries out the call, or a part of it."""
        self._log.add(HostAcquire(self.number, self._begun))
        try:
            with self._threads.carrying_out(self):
                yield
        finally:
            self._log.add(HostRelease(self.number, self._over))

    def awaited(self) -> None:
        """The current thread has waited for the call, and so for earlier ones of the same number."""
        self._log.add(HostAcquire(self._threads.current(), self._over))
        over = {call for call in list(self._threads.calls) if call.number == self.number and call._begun <= self._begun}
        self._threads.calls -= over
        if self in over:
            self._threads.free(self.number)
