"""The programs of a launch, of which any may wait for another, for a partition of itself, or for another process.

One thread at a time runs (it holds the baton); which one changes only where a program polls: where it reads a flag
again and finds the same. The calling thread runs program after program. A program that polls parks its thread, and
another thread goes on with the next program or with one that is parked, in turn. So a launch whose programs never wait
creates no thread. When everyone polls, only another process can help: the scheduler sleeps a little between rounds, and
hands the baton to launches from other Python threads meanwhile. When nothing has changed for the limit, it says who
waits for what.
"""

import itertools
import random
import threading
import time
from _thread import LockType
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import triton.language as tl

from iris.simulator import hang, interrupts, sanitizer
from iris.simulator.asynchronous import InFlight
from iris.simulator.partitions import Partitions

SHORTEST_SLEEP_S = 50e-6
LONGEST_SLEEP_S = 1e-3

# Time that one poll may add to the count of how long nothing has changed. It keeps a program that works for minutes
# between two polls from being taken for one that waits.
LONGEST_POLL_S = 5e-3

# How many observations a task remembers: more than any loop polls in turn.
REMEMBERED = 1 << 14

# Plain loads of so many elements at most may look at flags, how many of the same make a poll, and the time that such a
# one may add to the count: 1 ms for each load, since who only happens to load the same again is at work in between.
MOST_FLAGS, LOOKS_OF_A_POLL, LONGEST_LOOKS_S = 1024, 1000, 1.0

limit_s: float = 30.0
"""How long a launch may wait without any change; 0 for ever. IRIS_WAIT_TIMEOUT_S replaces it at activation."""

chance: random.Random | None = None
"""Decides whose turn it is, if that is to be left to chance: also where nobody waits."""

# How often a program that has learnt something, or told it, lets another go on; and how much later than others a rank
# may begin a launch.
SHARE_OF_TURNS = 0.25
LATEST_S = 2e-3

_baton = threading.Lock()
_current: "Task | None" = None


def _closed_gate() -> LockType:
    """A lock to wait at: one thread acquires it, another opens it by releasing it."""
    gate = threading.Lock()
    gate.acquire()
    return gate


class _Unwound(BaseException):
    """Raised in a parked program whose launch has failed, to leave its frames."""


@dataclass(frozen=True)
class Poll:
    """What a program saw when it looked at memory again and found it unchanged."""

    operation: str
    pointers: np.ndarray
    values: np.ndarray
    element: tl.dtype
    expected: np.ndarray | None
    waits_for: str | None


@dataclass(eq=False)
class Task:
    """A program, or a partition of one, and the thread that it runs on."""

    launch: "Launch"
    index: tuple[int, int, int]
    body: Callable[[], None]
    num_warps: int
    parent: "Task | None" = None
    partition: int | None = None
    """Which one of its program: 0 is the default one, that of the program's own warps; None if there is one only."""
    partitions: Partitions | None = None
    """What its partitions do to shared memory, while it has any."""
    children: int = 0
    joining: bool = False
    thread: int = 0
    gate: LockType = field(default_factory=_closed_gate)
    seen: dict[tuple[str, int], int] = field(default_factory=dict)
    issued_at: tuple | None = None  # of what a GPU does beside the program: where it was asked for, and by whom
    async_proxy: bool = False  # what it accesses now, TMA does, and not its threads
    poll: Poll | None = None
    repeated: Counter[tuple[str, int]] = field(default_factory=Counter)
    """What it has looked at since it saw anything new, and how often."""
    looks: Counter[int] = field(default_factory=Counter)
    """What it has loaded with its values, and how often, as plain loads."""
    stores: bool = False
    """Whether it has stored anything since such a load was last taken for a poll."""
    in_flight: InFlight = field(default_factory=InFlight)

    @property
    def program(self) -> "Task":
        """The task of the whole program, whose partition this is or which it is itself."""
        return self.parent or self

    @property
    def partitioned(self) -> bool:
        """Whether it shares its program's shared memory with another task."""
        return self.children > 0 or self.parent is not None


def in_kernel() -> bool:
    """Whether a task runs now, on this thread: while a launch rests, others of Python's go on."""
    return _current is not None and _current.thread == threading.get_ident()


def current() -> Task:
    """The task that runs now."""
    if _current is None:
        raise RuntimeError("a kernel's operation was used outside a kernel")
    return _current


def observe(
    operation: str,
    pointers: np.ndarray,
    values: np.ndarray,
    element: tl.dtype,
    changed: Callable[[], bool],
    expected: np.ndarray | None = None,
    waits_for: str | None = None,
) -> None:
    """Note that the current program has looked at memory, and let others run if it saw nothing new.

    ``changed`` tells whether the operation itself changed memory; it is asked only if it matters. ``waits_for`` says in
    words what is missing, where the values alone do not.
    """
    task = _current
    if task is None:
        return
    task.launch.leave_if_failed()
    key, now = (operation, hash(pointers.tobytes())), hash(values.tobytes())
    if task.seen.get(key) != now or changed():
        if len(task.seen) >= REMEMBERED:
            task.seen.clear()
        task.seen[key] = now
        task.repeated.clear()
        task.launch.progress()
        if chance is not None and chance.random() < SHARE_OF_TURNS:
            task.launch.take_turns(task)
        return
    task.poll = Poll(operation, pointers, values, element, expected, waits_for)
    task.repeated[key] += 1
    task.launch.let_others_run(task)


def looked(pointers: np.ndarray, values: np.ndarray, element: tl.dtype) -> None:
    """Note that the current program has loaded these, without saying that they may change meanwhile.

    Who loads the same so often may wait for a program that has not had its turn, or for nobody.
    """
    task = _current
    if task is None or not 0 < pointers.size <= MOST_FLAGS:
        return
    if len(task.looks) >= REMEMBERED:
        task.looks.clear()
    key = hash((pointers.tobytes(), values.tobytes()))
    task.looks[key] += 1
    if task.looks[key] == 1:
        task.launch.progress()
    elif task.looks[key] % LOOKS_OF_A_POLL == 0:
        task.launch.leave_if_failed()
        task.poll = Poll("plain loads", pointers, values, element, None, None)
        stores, task.stores = task.stores, False
        task.launch.let_others_run(task, 0.0 if stores else LONGEST_LOOKS_S)


def stored() -> None:
    """Note that the current program has stored something: it is at work, however often it loads the same."""
    if _current is not None:
        _current.stores = True


def sharing() -> tuple[Partitions | None, Task]:
    """What the partitions of the current program do to shared memory, if it has any; the current task."""
    task = current()
    return task.program.partitions, task


def may_be_flag() -> None:
    """Note that the current task uses memory by which partitions may tell each other something."""
    partitions, task = sharing()
    if partitions is not None:
        partitions.meets(task)


def give_way() -> None:
    """Let the partitions of the current program, and who else waits, go on before it does."""
    task = _current
    if task is not None and task.partitioned:
        task.launch.let_waiting_run(task)


def run(name: str, dims: tuple[int, int, int], num_warps: int, program: Callable[[], None]) -> None:
    """Run ``program`` once for each index of the grid; returns when all have finished.

    Raises what a program raised, after the others have been unwound, and `IrisTimeoutError` when all of them wait and
    nothing changes. Launches from several threads take turns; a program may launch another kernel.
    """
    global _current
    launch = Launch(name, dims, num_warps, program)
    outer = _current if _current is not None and _current.thread == threading.get_ident() else None
    with interrupts.deferred(launch.fail, Launch._execute.__code__):
        while outer is None and not _baton.acquire(timeout=0.1):
            launch.raise_error()
        try:
            if sanitizer.recorder is not None:
                sanitizer.recorder.launched(launch)
            launch.run()
        finally:
            if sanitizer.recorder is not None:
                sanitizer.recorder.finished(launch)
            _current = outer
            if outer is None:
                _baton.release()
    launch.raise_error()


class Launch:
    """One launch and its tasks. All methods are called by the thread that holds the baton."""

    def __init__(self, name: str, dims: tuple[int, int, int], num_warps: int, program: Callable[[], None]) -> None:
        self.name = name
        self.dims = dims
        self.live: set[Task] = set()
        self.meetings: dict[int, Any] = {}  # of clusters, by number: `iris.simulator.cluster`
        indices: Iterable[tuple[int, ...]] = itertools.product(*map(range, dims))
        if chance is not None:
            time.sleep(LATEST_S * chance.random())
            indices = list(indices)
            chance.shuffle(indices)
        self._programs: Iterator[Task] = (Task(self, index, program, num_warps) for index in indices)
        self._partitions: deque[Task] = deque()
        self._parked: deque[Task] = deque()
        self._finished = _closed_gate()
        self._error: BaseException | None = None
        self.progress()

    def run(self) -> None:
        self._work(self._start_another())
        self._finished.acquire()

    def fail(self, error: BaseException) -> None:
        """End the launch with ``error``: programs leave at their next access that may be a wait."""
        self._error = self._error or error

    def raise_error(self) -> None:
        error, self._error = self._error, None  # its traceback holds this launch: no cycle is to keep both
        if error is not None:
            try:
                raise error
            finally:
                del error

    def leave_if_failed(self) -> None:
        if self._error is not None:
            raise _Unwound

    def fork(self, parent: Task, bodies: Sequence[Callable[[], None]], num_warps: Sequence[int]) -> None:
        """Add partitions that run beside ``parent``; `join` waits for them."""
        parent.partition, parent.partitions = 0, Partitions(len(bodies))
        for number, (body, warps) in enumerate(zip(bodies, num_warps, strict=True), 1):
            parent.children += 1
            self._partitions.append(Task(self, parent.index, body, warps, parent, number))
        if sanitizer.recorder is not None:
            sanitizer.recorder.forked(parent, len(bodies))

    def join(self, parent: Task) -> None:
        if parent.children:
            parent.joining = True
            self._pass_on()
            self._park(parent)
        if parent.partitions is not None and sanitizer.recorder is not None:
            sanitizer.recorder.joined(parent, parent.partitions.count)
        parent.partition = parent.partitions = None

    def progress(self) -> None:
        """Something has changed: nobody is known to wait in vain."""
        self._polls, self._polling_s = 0, 0.0
        self._waited = 0.0
        self._polled_at = time.monotonic()
        self._sleep = SHORTEST_SLEEP_S

    def let_others_run(self, task: Task, longest_s: float = LONGEST_POLL_S) -> None:
        """``task`` polls in vain, which took it ``longest_s`` at most; returns when it is its turn again."""
        self._polls += 1
        self._polling_s += longest_s
        starting = self._start_another()
        if starting is not None:
            self._begin_on_new_thread(starting, task)
            self._park(task)
            return
        if self._polls > len(self._parked):
            self._rest(task)
        if self._parked:
            self._parked.append(task)
            self._pass_on()
            self._park(task)

    def take_turns(self, task: Task) -> None:
        """Another program goes on, or begins, before ``task`` does."""
        starting = self._start_another()
        if starting is not None:
            self._begin_on_new_thread(starting, task)
            self._park(task)
        elif self._parked:
            self._parked.append(task)
            self._pass_on()
            self._park(task)

    def let_waiting_run(self, task: Task) -> None:
        """All that wait, and partitions that have not begun, have a turn; programs that have not begun do not."""
        self.progress()
        if self._partitions:
            self._begin_on_new_thread(self._partitions.popleft(), task)
            self._park(task)
        elif self._parked:
            self._parked.append(task)
            self._parked.popleft().gate.release()
            self._park(task)

    # Tasks and threads ----------------------------------------------------------------------------------------------

    def _start_another(self) -> Task | None:
        """A task that has not begun, or None."""
        if self._error is not None:
            while self._partitions:
                self._leave(self._partitions.popleft())
            return None
        return self._partitions.popleft() if self._partitions else next(self._programs, None)

    def _pass_on(self) -> None:
        """Give the baton to a task that has not begun, or to the one that has been parked longest."""
        starting = self._start_another()
        if starting is not None:
            self._begin_on_new_thread(starting)
        elif self._parked:
            if chance is not None:
                self._parked.rotate(chance.randrange(len(self._parked)))
            self._parked.popleft().gate.release()
        else:
            self._finished.release()

    def _begin_on_new_thread(self, task: Task, parking: Task | None = None) -> None:
        try:
            threading.Thread(target=self._work_when_given_the_baton, args=(task,), daemon=True).start()
        except RuntimeError:  # the system has no more threads: this program fails, and with it the launch
            self._partitions.appendleft(task)
            raise
        if parking is not None:
            self._parked.append(parking)
        task.gate.release()

    def _work_when_given_the_baton(self, task: Task) -> None:
        task.gate.acquire()
        self._work(task)

    def _work(self, task: Task | None) -> None:
        """Run tasks on this thread until none is left to begin, then pass the baton on for good."""
        while task is not None:
            self._execute(task)
            task = self._start_another()
        self._pass_on()

    def _execute(self, task: Task) -> None:
        global _current
        task.thread = threading.get_ident()
        _current = task
        self.live.add(task)
        self.progress()
        try:
            # What a GPU does silently, numpy warns of.
            with np.errstate(all="ignore"):
                task.body()
                self.join(task)
                task.in_flight.write()
        except _Unwound:
            pass
        except BaseException as error:
            if sanitizer.recorder is not None:
                sanitizer.recorder.failed(error)
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(f"in program {task.index} of kernel {self.name!r}")
            self.fail(error)
        self.live.discard(task)
        self._leave(task)
        self.progress()

    def _leave(self, task: Task) -> None:
        """``task`` is over; wakes the program that waits for its last partition."""
        parent = task.parent
        if parent is not None:
            parent.children -= 1
            if parent.joining and parent.children == 0:
                parent.joining = False
                self._parked.append(parent)

    def _park(self, task: Task) -> None:
        global _current
        task.gate.acquire()
        _current = task
        self.leave_if_failed()

    def _repeats(self) -> int:
        """How often every live program has looked at the same thing since it saw anything new."""
        live = [task for task in self.live if not task.joining]
        return min((max(task.repeated.values(), default=0) for task in live), default=0)

    def _rest(self, task: Task) -> None:
        """Everyone polls in vain: let other launches and processes run for a moment."""
        global _current
        start = time.monotonic()
        self._waited += min(start - self._polled_at, self._polling_s)
        deadlock = sanitizer.recorder is not None and sanitizer.recorder.is_over(self._repeats())
        if deadlock or (limit_s and self._waited >= limit_s):
            waits = hang.waits([live for live in self.live if not live.joining], Launch._execute.__code__)
            if sanitizer.recorder is not None:
                for wait in waits:
                    sanitizer.recorder.waits(self, wait)
            self.fail(hang.error(self.name, None if deadlock else limit_s, waits))
            raise _Unwound
        self._polls, self._polling_s = 0, 0.0
        _baton.release()
        try:
            time.sleep(self._sleep)
        finally:
            self._waited += time.monotonic() - start
            _baton.acquire()
            _current = task
        self._polled_at = time.monotonic()
        self._sleep = min(2 * self._sleep, LONGEST_SLEEP_S)
