"""The program's threads of Python: what orders them, and whether one of them may still launch something.

In the simulator a thread is what a stream is on a GPU: its launches run one after the other, beside those of other
threads. So each thread that the program starts has a number, and in the analysis a vector clock.

What orders threads: `start` and `join`, locks (`locks`), what `threading` and `queue` build on conditions, and tasks of
executors (`interceptors`). Each of these becomes a release by one thread and an acquire by another.

Threads of this library, and those of which no `start` was seen, count as the thread that made the context. If one
carries out an asynchronous call, what it does counts as the call's (`calls`).
"""

import contextlib
import functools
import itertools
import multiprocessing.pool
import sys
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from iris.sanitizer import locks
from iris.sanitizer.calls import Call
from iris.sanitizer.event_log import EventLog
from iris.sanitizer.events import HOST, HostAcquire, HostRelease
from iris.sanitizer.interceptors import INTERCEPTORS
from iris.simulator import lines
from iris.simulator.grid import TaskThread

# So many of the latest tasks of executors have numbers of their own. Older ones' numbers are given out again.
MOST_TASKS = 256

# Packages that start threads for themselves: these threads launch nothing by themselves.
_HELPERS = ("iris", "torch", "multiprocessing", "tqdm")


class Threads:
    """The threads of this process, from now until `close`.

    ``watched``: gives a context manager that goes around all that a thread does. ``settled``: called when a thread has
    begun or ended to wait, or has ended.
    """

    def __init__(
        self, log: EventLog, watched: Callable[[], contextlib.AbstractContextManager], settled: Callable[[], None]
    ) -> None:
        self._log, self._watched, self._settled = log, watched, settled
        # Of the current thread: its number, the call that it carries out, and whether it ignores acquires.
        self._this = threading.local()
        self._numbers: weakref.WeakKeyDictionary[threading.Thread, int] = weakref.WeakKeyDictionary()
        self._keys: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._count = itertools.count(1)
        # While there is only one thread, nothing needs to be recorded.
        self._multithreaded = False
        # Threads that have begun and that nobody has joined.
        self._unjoined: set[threading.Thread] = set()
        # Threads that wait: for a thread to end, for other ranks, or for another thread to do something. Of the last,
        # with a function that says whether they still wait.
        self._joining: dict[threading.Thread, threading.Thread] = {}
        self._meeting: set[threading.Thread] = set()
        self._idle: dict[threading.Thread, Callable[[], bool]] = {}
        # Threads that a library has started for itself, and those that have ended.
        self._helpers: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._replaced = [(of, name, vars(of)[name], make(self, vars(of)[name])) for of, name, make in INTERCEPTORS]
        # Asynchronous calls that have begun and for which nobody has waited.
        self.calls: set[Call] = set()
        # Numbers: of streams; of calls that are over, by the number of a thread that knows it; and of tasks.
        self._streams: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._spare: dict[int, list[int]] = defaultdict(list)
        self._tasks: deque[int] = deque(maxlen=MOST_TASKS)
        locks.threads = self
        locks.replace()
        for of, name, _, new in self._replaced:
            setattr(of, name, new)

    def close(self) -> None:
        self._multithreaded, locks.threads = False, None
        locks.restore()
        for of, name, before, _ in self._replaced:
            setattr(of, name, before)

    def current(self) -> int:
        """The number of this thread, or of the asynchronous call that it carries out."""
        call = self.call()
        return getattr(self._this, "number", HOST) if call is None else call.number

    def call(self) -> Call | None:
        """The asynchronous call that this thread carries out, if it does."""
        return getattr(self._this, "call", None)

    def begin(self, place: int, stream: Any = None) -> Call:
        """An asynchronous call is made here. ``stream``: where it comes after the calls before it, if it is on one."""
        if stream is not None:
            number = self._streams.setdefault(stream, next(self._count))
        else:
            spare = self._spare[self.current()]
            number = spare.pop() if spare else next(self._count)
        return Call(self, self._log, number, place)

    def free(self, number: int) -> None:
        """The current thread has waited for the call of this number. Its next call may have the number."""
        if number not in self._tasks and number not in self._streams.values():
            self._spare[self.current()].append(number)

    def begin_task(self) -> Call:
        """A task is given here to an executor of several threads. Whichever runs it, it is unordered with other tasks.

        (But it is ordered with a task that comes `MOST_TASKS` after it, which has the same number.)
        """
        self._tasks.append(self._tasks[0] if len(self._tasks) == MOST_TASKS else next(self._count))
        self._multithreaded = True
        return Call(self, self._log, self._tasks[-1], None)

    @contextlib.contextmanager
    def carrying_out(self, call: Call) -> Iterator[None]:
        """While this lasts, what this thread does counts as the call's."""
        before, self._this.call = self.call(), call
        try:
            yield
        finally:
            self._this.call = before

    def watched(self) -> contextlib.AbstractContextManager:
        """Around what a thread does of which no `start` was seen."""
        return self._watched()

    def new_number(self) -> int:
        """A new number, for a thread, a call, a lock or the like."""
        return next(self._count)

    def several(self) -> bool:
        """Whether some may be at work at the same time, asynchronous calls included."""
        return bool(self._unjoined or self.calls)

    def may_help(self, busy: set[threading.Thread]) -> bool:
        """Whether a thread may still do something. ``busy``: threads whose launches wait."""
        idle = {thread for thread, is_idle in list(self._idle.items()) if is_idle()}
        stuck = {*busy, *self._meeting, *idle}
        while new := {one for one, other in self._joining.items() if other in stuck} - stuck:
            stuck |= new
        return any(thread not in stuck and not self._is_helper(thread) for thread in threading.enumerate())

    @contextlib.contextmanager
    def meeting(self) -> Iterator[None]:
        """While this lasts the current thread waits for other ranks."""
        thread = threading.current_thread()
        self._meeting.add(thread)
        try:
            yield
        finally:
            self._meeting.discard(thread)

    def any_in_meeting(self) -> bool:
        """Whether a thread waits for other ranks."""
        return bool(self._meeting)

    @contextlib.contextmanager
    def idle(self, is_idle: Callable[[], bool]) -> Iterator[None]:
        """While this lasts the current thread waits for another one of this rank, as long as ``is_idle()``."""
        thread = threading.current_thread()
        self._idle[thread] = is_idle
        self._settled()
        try:
            yield
        finally:
            del self._idle[thread]
            self._settled()

    def idlers(self, thing: Any) -> int:
        """How many threads wait in this `threading.Condition`."""
        return sum(getattr(is_idle, "waits_in", None) is thing for is_idle in list(self._idle.values()))

    def _is_helper(self, thread: threading.Thread) -> bool:
        """Whether this thread does nothing for the program by itself."""
        if thread in self._helpers or isinstance(thread, (TaskThread, threading._DummyThread)):
            return True
        return thread not in self._numbers and _module_of(thread).partition(".")[0] in _HELPERS

    def release(self, thing: Any) -> None:
        """The current thread releases into a lock, an event, a thread or the like."""
        if self._multithreaded:
            self._log.add(HostRelease(self.current(), self._key(thing)))

    def acquire(self, thing: Any) -> None:
        """The current thread acquires what was released there."""
        if self._multithreaded and not getattr(self._this, "ignores_acquires", False):
            self._log.add(HostAcquire(self.current(), self._key(thing)))

    @contextlib.contextmanager
    def ignoring_acquires(self) -> Iterator[None]:
        """While this lasts the current thread acquires nothing: it only hands over work, and does not act on it."""
        before, self._this.ignores_acquires = getattr(self._this, "ignores_acquires", False), True
        try:
            yield
        finally:
            self._this.ignores_acquires = before

    def start(self, thread: threading.Thread) -> None:
        """``thread`` is about to be started by the current one."""
        if isinstance(thread, TaskThread) or _is_started_by_a_library(thread, sys._getframe(2)):
            self._helpers.add(thread)
            # The threads of a `multiprocessing.pool` itself pass on what orders its workers with the program.
            if _module_of(thread) != "multiprocessing.pool":
                return
        self._numbers[thread] = next(self._count)
        self._unjoined.add(thread)
        self._multithreaded = True
        self.release(thread)
        thread.run = functools.partial(self._run, thread, thread.run)  # type: ignore[method-assign]

    def _run(self, thread: threading.Thread, run: Callable[[], None]) -> None:
        self._this.number = self._numbers[thread]
        self.acquire(thread)
        try:
            with self._watched():
                run()
        finally:
            self.release(thread)
            thread.__dict__.pop("run", None)
            self._helpers.add(thread)  # it does nothing more for the program
            self._settled()

    def is_over(self, thread: threading.Thread) -> None:
        """The current thread has found that ``thread`` is over."""
        if thread in self._numbers:
            self.acquire(thread)
            self._unjoined.discard(thread)

    @contextlib.contextmanager
    def joining(self, thread: threading.Thread) -> Iterator[None]:
        """While this lasts the current thread waits until ``thread`` ends."""
        self._joining[threading.current_thread()] = thread
        self._settled()
        try:
            yield
        finally:
            del self._joining[threading.current_thread()]
            self._settled()

    def _key(self, thing: Any) -> int:
        if thing not in self._keys:
            self._keys[thing] = next(self._count)
        return self._keys[thing]


def _module_of(thread: threading.Thread) -> str:
    """The module of the function that ``thread`` runs."""
    target = getattr(thread, "_target", None)
    return type(thread).__module__ if target is None else getattr(target, "__module__", None) or ""


def _is_started_by_a_library(thread: threading.Thread, starter: FrameType) -> bool:
    """Whether one of `_HELPERS` starts the thread, for itself.

    The workers of a pool work for the program. So does whatever the program starts, even a function of torch's.
    """
    is_worker = getattr(thread, "_target", None) is multiprocessing.pool.worker  # type: ignore[attr-defined]
    return not is_worker and lines.package_of(starter) in _HELPERS
