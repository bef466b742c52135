"""Calls that go on beside the thread that makes them, as torch's with ``async_op=True``, and what executors are given.

Such a call is like a thread of Python's that the caller starts, and that who waits for the call joins: it comes after
what was done before it was made, and in no order with what is done until somebody has waited for it. Calls of one
number follow each other.
"""

import contextlib
from collections.abc import Iterator
from typing import Protocol

from iris.sanitizer.events import HostAcquire, HostRelease
from iris.sanitizer.notes import Notes


class _Threads(Protocol):
    """What a call needs of `iris.sanitizer.threads.Threads`, which has it among its ``calls``."""

    calls: "set[Call]"

    def current(self) -> int: ...
    def new_number(self) -> int: ...
    def carrying_out(self, call: "Call") -> contextlib.AbstractContextManager[None]: ...
    def free(self, number: int) -> None: ...


class Call:
    """Made here. ``place``: the line that has asked for all that it does, if it has none of its own."""

    def __init__(self, threads: _Threads, notes: Notes, number: int, place: int | None) -> None:
        self.number, self.place = number, place
        self._threads, self._notes = threads, notes
        self._begun, self._over = threads.new_number(), threads.new_number()
        notes.add(HostRelease(threads.current(), self._begun))
        threads.calls.add(self)

    @contextlib.contextmanager
    def carried_out(self) -> Iterator[None]:
        """While this lasts, this thread carries it out, or a part of it."""
        self._notes.add(HostAcquire(self.number, self._begun))
        try:
            with self._threads.carrying_out(self):
                yield
        finally:
            self._notes.add(HostRelease(self.number, self._over))

    def awaited(self) -> None:
        """The current thread knows that it is over, and those before it."""
        self._notes.add(HostAcquire(self._threads.current(), self._over))
        over = {call for call in list(self._threads.calls) if call.number == self.number and call._begun <= self._begun}
        self._threads.calls -= over
        if self in over:
            self._threads.free(self.number)
