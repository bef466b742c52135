"""Functions in the place of those of `threading`, `queue` and executors. They record what these order.

(ThreadSanitizer calls such functions interceptors.) Each calls the function that it replaces. If that lets other
threads go on, the interceptor releases before the call. If it makes this thread go on after others, the interceptor
acquires after the call. `Threads` puts them in place.
"""

import concurrent.futures
import contextlib
import functools
import itertools
import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

from iris.sanitizer.calls import Call


class Threads(Protocol):
    """The part of `iris.sanitizer.threads.Threads` that interceptors use."""

    def start(self, thread: threading.Thread) -> None: ...
    def joining(self, thread: threading.Thread) -> contextlib.AbstractContextManager[None]: ...
    def is_over(self, thread: threading.Thread) -> None: ...
    def acquire(self, thing: Any) -> None: ...
    def release(self, thing: Any) -> None: ...
    def idle(self, is_idle: Callable[[], bool]) -> contextlib.AbstractContextManager[None]: ...
    def idlers(self, thing: Any) -> int: ...
    def begin_task(self) -> Call: ...
    def ignoring_acquires(self) -> contextlib.AbstractContextManager[None]: ...


def _start(threads: Threads, method: Callable) -> Callable:
    @functools.wraps(method)
    def start(thread: threading.Thread) -> None:
        threads.start(thread)
        with threads.ignoring_acquires():
            method(thread)

    return start


def _join(threads: Threads, method: Callable) -> Callable:
    @functools.wraps(method)
    def join(thread: threading.Thread, timeout: float | None = None) -> None:
        with threads.joining(thread):
            method(thread, timeout)
        thread.is_alive()

    return join


def _is_alive(threads: Threads, method: Callable) -> Callable:
    @functools.wraps(method)
    def is_alive(thread: threading.Thread) -> bool:
        alive = method(thread)
        if not alive:
            threads.is_over(thread)
        return alive

    return is_alive


def _make(threads: Threads, method: Callable) -> Callable:
    @functools.wraps(method)
    def make(condition: Any, lock: Any = None) -> None:
        method(condition, lock)
        lock, acquire, release = condition._lock, condition.acquire, condition.release

        def acquired(*args: Any, **kwargs: Any) -> bool:
            taken = acquire(*args, **kwargs)
            if taken:
                threads.acquire(lock)
            return taken

        def released() -> None:
            threads.release(lock)
            release()

        condition.acquire, condition.release = acquired, released  # type: ignore[method-assign]

    return make


def _enter(threads: Threads, method: Callable) -> Callable:
    @functools.wraps(method)
    def enter(condition: Any) -> Any:
        result = method(condition)
        threads.acquire(condition._lock)
        return result

    return enter


def _exit(threads: Threads, method: Callable) -> Callable:
    @functools.wraps(method)
    def leave(condition: Any, *error: Any) -> Any:
        threads.release(condition._lock)
        return method(condition, *error)

    return leave


def _wait(threads: Threads, method: Callable) -> Callable:
    @functools.wraps(method)
    def wait(condition: Any, timeout: float | None = None) -> Any:
        threads.release(condition._lock)

        def is_idle() -> bool:
            # A thread that was notified is no longer among the condition's waiters, even before it has noticed.
            return len(condition._waiters) >= threads.idlers(condition)

        is_idle.waits_in = condition  # type: ignore[attr-defined]
        with threads.idle(is_idle) if timeout is None else contextlib.nullcontext():
            result = method(condition, timeout)
        threads.acquire(condition._lock)
        return result

    return wait


def _set(threads: Threads, method: Callable) -> Callable:
    @functools.wraps(method)
    def set_event(event: threading.Event) -> None:
        threads.release(event)
        method(event)

    return set_event


def _is_set(threads: Threads, method: Callable) -> Callable:
    @functools.wraps(method)
    def is_set(event: threading.Event) -> bool:
        result = method(event)
        if result:
            threads.acquire(event)
        return result

    return is_set


def _submit(threads: Threads, method: Callable) -> Callable:
    @functools.wraps(method)
    def submit(executor: Any, function: Callable, /, *args: Any, **kwargs: Any) -> Any:
        call = threads.begin_task() if executor._max_workers > 1 else None

        def given() -> Any:
            if call is None:
                threads.acquire(given)
                return function(*args, **kwargs)
            try:
                with call.carried_out():
                    return function(*args, **kwargs)
            finally:
                call.awaited()

        if call is None:
            threads.release(given)
        with threads.ignoring_acquires():
            return method(executor, given)

    return submit


class _Item:
    """An item of a queue. A thread that takes it acquires what was released when it was put there, and no more."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _simple_queue(threads: Threads, kind: type) -> type:
    class SimpleQueue(kind):
        def __init__(self) -> None:
            # How many items were put here, and how many were taken.
            self._put, self._taken = itertools.count(), itertools.count()
            self.items_put = self.items_taken = 0

        def put(self, value: Any, block: bool = True, timeout: float | None = None) -> None:
            item = _Item(value)
            threads.release(item)
            self.items_put = next(self._put) + 1
            super().put(item, block, timeout)

        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            waits = block and timeout is None
            with threads.idle(lambda: self.items_put == self.items_taken) if waits else contextlib.nullcontext():
                item = super().get(block, timeout)
                self.items_taken = next(self._taken) + 1
            threads.acquire(item)
            return item.value

        def put_nowait(self, value: Any) -> None:
            self.put(value)

        def get_nowait(self) -> Any:
            return self.get(False)

    return SimpleQueue


# Of what, which attribute, and what makes its interceptor from it.
INTERCEPTORS: list[tuple[Any, str, Callable[[Threads, Any], Any]]] = [
    (threading.Thread, "start", _start),
    (threading.Thread, "join", _join),
    (threading.Thread, "is_alive", _is_alive),
    (threading.Condition, "__init__", _make),
    (threading.Condition, "__enter__", _enter),
    (threading.Condition, "__exit__", _exit),
    (threading.Condition, "wait", _wait),
    (threading.Event, "set", _set),
    (threading.Event, "is_set", _is_set),
    (concurrent.futures.ThreadPoolExecutor, "submit", _submit),
    (queue, "SimpleQueue", _simple_queue),
]
