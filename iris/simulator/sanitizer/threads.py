"""The threads of Python that a program has: what orders them, and whether one of them may still launch something.

In the simulator a thread is what a stream is on a GPU: its launches run one after the other, beside those of others. So
each that the program starts is a host of its own. What it did before comes before what another does that knows of it:
by `start` and `join`, by what `threading` and `queue` build on conditions, and by what an executor is given and gives
back. Threads of this library's, and those that no `start` was seen of, count as the one that made the context.
"""

import concurrent.futures
import contextlib
import functools
import itertools
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from iris.simulator.grid import TaskThread
from iris.simulator.sanitizer.events import HOST, HostHeard, HostTold

if TYPE_CHECKING:
    from iris.simulator.sanitizer.notes import Notes

# Threads of these wait for what the program does, and launch nothing.
_HELPERS = ("iris", "torch", "multiprocessing", "tqdm")


class Threads:
    """Of this process, from when one looks until `close`. ``watched``: around all that a thread does."""

    def __init__(self, notes: "Notes", watched: Callable[[], contextlib.AbstractContextManager]) -> None:
        self._notes, self._watched = notes, watched
        # Of this thread, which may not know itself yet.
        self._this = threading.local()
        self._numbers: weakref.WeakKeyDictionary[threading.Thread, int] = weakref.WeakKeyDictionary()
        self._keys: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._count = itertools.count(1)
        # Nothing needs to be told while there is one only.
        self._telling = False
        # Threads that have begun and that nobody has joined; and of those that wait for another, which.
        self._apart: set[threading.Thread] = set()
        self._joining: dict[threading.Thread, threading.Thread] = {}
        self._replaced = [(of, name, vars(of)[name], new(self, vars(of)[name])) for of, name, new in _REPLACED]
        for of, name, _, new in self._replaced:
            setattr(of, name, new)

    def close(self) -> None:
        self._telling = False
        for of, name, before, _ in self._replaced:
            setattr(of, name, before)

    def current(self) -> int:
        """The number of this thread, in the place of a program's."""
        return getattr(self._this, "number", HOST)

    def several(self) -> bool:
        """Whether some may be at work beside each other."""
        return bool(self._apart)

    def may_help(self, busy: set[threading.Thread]) -> bool:
        """Whether a thread may still do something, other than those that are ``busy`` with launches that wait."""
        stuck = set(busy)
        while new := {one for one, other in self._joining.items() if other in stuck} - stuck:
            stuck |= new
        return any(thread not in stuck and not _is_helper(thread) for thread in threading.enumerate())

    def tells(self, thing: Any) -> None:
        if self._telling:
            self._notes.add(HostTold(self.current(), self._key(thing)))

    def hears(self, thing: Any) -> None:
        if self._telling and not getattr(self._this, "deaf", False):
            self._notes.add(HostHeard(self.current(), self._key(thing)))

    @contextlib.contextmanager
    def deaf(self) -> Iterator[None]:
        """While this lasts, this thread does what tells it nothing that it may go on by: it only gives away work."""
        before, self._this.deaf = getattr(self._this, "deaf", False), True
        try:
            yield
        finally:
            self._this.deaf = before

    def start(self, thread: threading.Thread) -> None:
        """It is about to be started."""
        if isinstance(thread, TaskThread) or _is_helper(thread):
            return
        self._numbers[thread] = next(self._count)
        self._apart.add(thread)
        self._telling = True
        self.tells(thread)
        thread.run = functools.partial(self._run, thread, thread.run)

    def _run(self, thread: threading.Thread, run: Callable[[], None]) -> None:
        self._this.number = self._numbers[thread]
        self.hears(thread)
        try:
            with self._watched():
                run()
        finally:
            self.tells(thread)
            thread.__dict__.pop("run", None)

    def is_over(self, thread: threading.Thread) -> None:
        """The current thread has found that ``thread`` is over."""
        if thread in self._numbers:
            self.hears(thread)
            self._apart.discard(thread)

    @contextlib.contextmanager
    def joining(self, thread: threading.Thread) -> Iterator[None]:
        self._joining[threading.current_thread()] = thread
        try:
            yield
        finally:
            del self._joining[threading.current_thread()]

    def _key(self, thing: Any) -> int:
        if thing not in self._keys:
            self._keys[thing] = next(self._count)
        return self._keys[thing]


def _is_helper(thread: threading.Thread) -> bool:
    if isinstance(thread, (TaskThread, threading._DummyThread)):
        return True
    target = getattr(thread, "_target", None)
    module = type(thread).__module__ if target is None else getattr(target, "__module__", None) or ""
    return module.partition(".")[0] in _HELPERS


# What stands in for what, and tells it -----------------------------------------------------------------------------


def _start(threads: Threads, method: Callable) -> Callable:
    @functools.wraps(method)
    def start(thread: threading.Thread) -> None:
        threads.start(thread)
        with threads.deaf():
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


def _enter(threads: Threads, method: Callable) -> Callable:
    @functools.wraps(method)
    def enter(condition: threading.Condition) -> Any:
        result = method(condition)
        threads.hears(condition._lock)
        return result

    return enter


def _exit(threads: Threads, method: Callable) -> Callable:
    @functools.wraps(method)
    def leave(condition: threading.Condition, *error: Any) -> Any:
        threads.tells(condition._lock)
        return method(condition, *error)

    return leave


def _wait(threads: Threads, method: Callable) -> Callable:
    @functools.wraps(method)
    def wait(condition: threading.Condition, timeout: float | None = None) -> Any:
        threads.tells(condition._lock)
        result = method(condition, timeout)
        threads.hears(condition._lock)
        return result

    return wait


def _set(threads: Threads, method: Callable) -> Callable:
    @functools.wraps(method)
    def set_event(event: threading.Event) -> None:
        threads.tells(event)
        method(event)

    return set_event


def _is_set(threads: Threads, method: Callable) -> Callable:
    @functools.wraps(method)
    def is_set(event: threading.Event) -> bool:
        result = method(event)
        if result:
            threads.hears(event)
        return result

    return is_set


def _submit(threads: Threads, method: Callable) -> Callable:
    @functools.wraps(method)
    def submit(executor: Any, function: Callable, /, *args: Any, **kwargs: Any) -> Any:
        def given() -> Any:
            threads.hears(given)
            return function(*args, **kwargs)

        threads.tells(given)
        with threads.deaf():
            return method(executor, given)

    return submit


class _Item:
    """What an item of a queue comes with: who takes it knows what was done before it was put there, and no more."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _simple_queue(threads: Threads, kind: type) -> type:
    class SimpleQueue(kind):
        def put(self, value: Any, block: bool = True, timeout: float | None = None) -> None:
            item = _Item(value)
            threads.tells(item)
            super().put(item, block, timeout)

        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            item = super().get(block, timeout)
            threads.hears(item)
            return item.value

        def put_nowait(self, value: Any) -> None:
            self.put(value)

        def get_nowait(self) -> Any:
            return self.get(False)

    return SimpleQueue


_REPLACED = [
    (threading.Thread, "start", _start),
    (threading.Thread, "join", _join),
    (threading.Thread, "is_alive", _is_alive),
    (threading.Condition, "__enter__", _enter),
    (threading.Condition, "__exit__", _exit),
    (threading.Condition, "wait", _wait),
    (threading.Event, "set", _set),
    (threading.Event, "is_set", _is_set),
    (concurrent.futures.ThreadPoolExecutor, "submit", _submit),
    (queue, "SimpleQueue", _simple_queue),
]
