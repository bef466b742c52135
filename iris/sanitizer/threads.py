"""The threads of Python that a program has: what orders them, and whether one of them may still launch something.

In the simulator a thread is what a stream is on a GPU: its launches run one after the other, beside those of others. So
each that the program starts is a host of its own. What it did before comes before what another does that knows of it:
by `start` and `join`, by locks (`locks`), by what `threading` and `queue` build on conditions, and by what an executor
is given and gives back (`interceptors`). Threads of this library's, and those that no `start` was seen of, count as the
one that made the context; or, if they carry out a call that goes on beside a thread, for the call (`calls`).
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
from iris.sanitizer.events import HOST, HostAcquire, HostRelease
from iris.sanitizer.interceptors import INTERCEPTORS
from iris.sanitizer.notes import Notes
from iris.simulator import lines
from iris.simulator.grid import TaskThread

# So many of the latest tasks that executors were given have numbers of their own.
MOST_TASKS = 256

# Threads that these start wait for what the program does, and launch nothing.
_HELPERS = ("iris", "torch", "multiprocessing", "tqdm")


class Threads:
    """Of this process, from when one looks until `close`.

    ``watched``: around all that a thread does. ``settled``: called when a thread has begun or ended to wait, or ended.
    """

    def __init__(
        self, notes: Notes, watched: Callable[[], contextlib.AbstractContextManager], settled: Callable[[], None]
    ) -> None:
        self._notes, self._watched, self._settled = notes, watched, settled
        # Of this thread, which may not know itself yet.
        self._this = threading.local()
        self._numbers: weakref.WeakKeyDictionary[threading.Thread, int] = weakref.WeakKeyDictionary()
        self._keys: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._count = itertools.count(1)
        # While there is one only, nothing needs to be released.
        self._multithreaded = False
        # Threads that have begun and that nobody has joined; and of those that wait for another, which.
        self._apart: set[threading.Thread] = set()
        self._joining: dict[threading.Thread, threading.Thread] = {}
        # Those that wait for other ranks; and for another thread of this one, with what says whether that has come.
        self._meeting: set[threading.Thread] = set()
        self._idle: dict[threading.Thread, Callable[[], bool]] = {}
        # Those that a library has started, for itself.
        self._helpers: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._replaced = [(of, name, vars(of)[name], make(self, vars(of)[name])) for of, name, make in INTERCEPTORS]
        # Calls that have begun and that nobody has waited for.
        self.calls: set[Call] = set()
        # The numbers of streams; those of calls that are over, by the threads that know it; and those of tasks.
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
        """The number of this thread, or of the call that it carries out, in the place of a program's."""
        call = self.call()
        return getattr(self._this, "number", HOST) if call is None else call.number

    def call(self) -> Call | None:
        """The call that this thread carries out."""
        return getattr(self._this, "call", None)

    def begin(self, place: int, stream: Any = None) -> Call:
        """A call is made here. ``stream``: on which it follows the calls before it, if it is on one."""
        if stream is not None:
            number = self._streams.setdefault(stream, next(self._count))
        else:
            spare = self._spare[self.current()]
            number = spare.pop() if spare else next(self._count)
        return Call(self, self._notes, number, place)

    def free(self, number: int) -> None:
        """The current thread knows that the call of this number is over, and may give the number to the next."""
        if number not in self._tasks and number not in self._streams.values():
            self._spare[self.current()].append(number)

    def begin_task(self) -> Call:
        """An executor of several threads is given something here: in whichever of them, it is in no order with others.

        Except with what is so far after it that it has the same number again.
        """
        self._tasks.append(self._tasks[0] if len(self._tasks) == MOST_TASKS else next(self._count))
        self._multithreaded = True
        return Call(self, self._notes, self._tasks[-1], None)

    @contextlib.contextmanager
    def carrying_out(self, call: Call) -> Iterator[None]:
        """While this lasts, what this thread does counts as the call's."""
        before, self._this.call = self.call(), call
        try:
            yield
        finally:
            self._this.call = before

    def watched(self) -> contextlib.AbstractContextManager:
        """Around what a thread does that no `start` was seen of."""
        return self._watched()

    def new_number(self) -> int:
        """Another one each time, for a thread, a call or a thing."""
        return next(self._count)

    def several(self) -> bool:
        """Whether some may be at work beside each other."""
        return bool(self._apart or self.calls)

    def may_help(self, busy: set[threading.Thread]) -> bool:
        """Whether a thread may still do something, other than those that are ``busy`` with launches that wait."""
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
        return bool(self._meeting)

    @contextlib.contextmanager
    def idle(self, is_idle: Callable[[], bool]) -> Iterator[None]:
        """While this lasts the current thread waits for another of this rank, which has not come if ``is_idle()``."""
        thread = threading.current_thread()
        self._idle[thread] = is_idle
        self._settled()
        try:
            yield
        finally:
            del self._idle[thread]
            self._settled()

    def idlers(self, thing: Any) -> int:
        """How many threads wait in this condition."""
        return sum(getattr(is_idle, "waits_in", None) is thing for is_idle in list(self._idle.values()))

    def _is_helper(self, thread: threading.Thread) -> bool:
        """Whether it does nothing for the program by itself."""
        if thread in self._helpers or isinstance(thread, (TaskThread, threading._DummyThread)):
            return True
        return thread not in self._numbers and _module_of(thread).partition(".")[0] in _HELPERS

    def release(self, thing: Any) -> None:
        if self._multithreaded:
            self._notes.add(HostRelease(self.current(), self._key(thing)))

    def acquire(self, thing: Any) -> None:
        if self._multithreaded and not getattr(self._this, "ignores_acquires", False):
            self._notes.add(HostAcquire(self.current(), self._key(thing)))

    @contextlib.contextmanager
    def ignoring_acquires(self) -> Iterator[None]:
        """While this lasts, what this thread acquires orders nothing that it does: it only gives away work."""
        before, self._this.ignores_acquires = getattr(self._this, "ignores_acquires", False), True
        try:
            yield
        finally:
            self._this.ignores_acquires = before

    def start(self, thread: threading.Thread) -> None:
        """It is about to be started."""
        if isinstance(thread, TaskThread) or _is_started_by_a_library(thread, sys._getframe(2)):
            self._helpers.add(thread)
            # A pool's own threads hand on what orders its workers with the program.
            if _module_of(thread) != "multiprocessing.pool":
                return
        self._numbers[thread] = next(self._count)
        self._apart.add(thread)
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
            self._helpers.add(thread)  # it does no more for the program
            self._settled()

    def is_over(self, thread: threading.Thread) -> None:
        """The current thread has found that ``thread`` is over."""
        if thread in self._numbers:
            self.acquire(thread)
            self._apart.discard(thread)

    @contextlib.contextmanager
    def joining(self, thread: threading.Thread) -> Iterator[None]:
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
    """Of what it runs."""
    target = getattr(thread, "_target", None)
    return type(thread).__module__ if target is None else getattr(target, "__module__", None) or ""


def _is_started_by_a_library(thread: threading.Thread, starter: FrameType) -> bool:
    """Whether one of `_HELPERS` starts it, for itself: a pool's workers work for the program.

    Whatever the program starts works for it, be it a function of torch's.
    """
    is_worker = getattr(thread, "_target", None) is multiprocessing.pool.worker  # type: ignore[attr-defined]
    return not is_worker and lines.package_of(starter) in _HELPERS
