"""The programs of a launch, of which any may wait for another, for a partition of itself, or for another process.

One thread at a time runs (it holds the baton); which one changes only where a program polls: where it reads a flag
again and finds the same. The calling thread runs program after program. A program that polls parks its thread, and
another thread goes on with the next program or with one that is parked, in turn. So a launch whose programs never wait
creates no thread. When everyone polls, only another process can help: the scheduler sleeps a little between rounds, and
hands the baton to launches from other Python threads meanwhile. When nothing has changed for the limit, it says who
waits for what. How a program shows that it polls is in `iris.simulator.tasks`.
"""

import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from iris import observer
from iris.compat.dispatch import hidden_from_modes
from iris.simulator import hang, interrupts, tasks
from iris.simulator.partitions import Partitions
from iris.simulator.tasks import Task, closed_gate

SHORTEST_SLEEP_S = 50e-6
LONGEST_SLEEP_S = 1e-3

# Time that one poll may add to the count of how long nothing has changed. It keeps a program that works for minutes
# between two polls from being taken for one that waits.
LONGEST_POLL_S = 5e-3
# And one sleep between two rounds: a process that was stopped meanwhile (SIGSTOP, Ctrl-Z) has not waited for so long.
LONGEST_REST_S = 0.1

# While what programs have looked at stays, none of them polls for so long, or for so many times as long as a round of
# their polls takes. Then they do: a loop may also look at a clock, or count its rounds.
LONGEST_UNCHANGED_S, LONGEST_UNCHANGED_ROUNDS = 5e-3, 8

limit_s: float = 30.0
"""How long a launch may wait without any change; 0 for ever. IRIS_WAIT_TIMEOUT_S replaces it at activation."""

watchers: list[Callable[[Callable[[], list[int]]], BaseException | None]] = []
"""Asked while all programs of a launch wait, with a function that returns the addresses at which they do; the launch
ends with the error that one of them returns."""

chance: random.Random | None = None
"""Decides whose turn it is, if that is to be left to chance: also where nobody waits."""

# How often a program that has acquired or released something lets another go on; and how much later than others a
# rank may begin a launch.
SHARE_OF_TURNS = 0.25
LATEST_S = 2e-3

# After so long without any change, a wait is taken for one for a rank that has died, if one has; or for one whose
# program has ended well: another rank may still be at work on what it left. And how often to ask.
LOST_S, LEFT_S, LOST_INTERVAL_S = 1.0, 2.0, 0.1

_baton = threading.Lock()


class TaskThread(threading.Thread):
    """One that a launch has begun: no part of the program that launches."""


class _Unwound(BaseException):
    """Raised in a parked program whose launch has failed, to leave its frames."""


def run(name: str, dims: tuple[int, int, int], num_warps: int, program: Callable[[], None]) -> None:
    """Run ``program`` once for each index of the grid; returns when all have finished.

    Raises what a program raised, after the others have been unwound, and `IrisTimeoutError` when all of them wait and
    nothing changes. Launches from several threads take turns; a program may launch another kernel.
    """
    launch = Launch(name, dims, num_warps, program)
    outer = tasks.running if tasks.in_kernel() else None
    with interrupts.deferred(launch.fail, Launch._execute.__code__):
        while outer is None and not _baton.acquire(timeout=0.1):
            launch.raise_error()
        try:
            if observer.recorder is not None:
                observer.recorder.launched(launch)
            launch.run()
        finally:
            if observer.recorder is not None:
                observer.recorder.finished(launch)
            tasks.running = outer
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
        columns, rows, layers = map(range, dims)
        indices: Iterable[tuple[int, int, int]] = itertools.product(columns, rows, layers)
        if chance is not None:
            time.sleep(LATEST_S * chance.random())
            indices = list(indices)
            chance.shuffle(indices)
        self._programs: Iterator[Task] = (Task(self, index, program, num_warps) for index in indices)
        self._partitions: deque[Task] = deque()
        self._parked: deque[Task] = deque()
        self._finished = closed_gate()
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
        children = [
            Task(self, parent.index, body, warps, parent, number)
            for number, (body, warps) in enumerate(zip(bodies, num_warps, strict=True), 1)
        ]
        parent.partition, parent.partitions, parent.forked = 0, parent.partitions or Partitions(), children
        parent.partitions.fork(parent, children)
        parent.children += len(children)
        self._partitions.extend(children)
        if observer.recorder is not None:
            observer.recorder.forked(parent, len(bodies))

    def join(self, parent: Task) -> None:
        if parent.children:
            parent.joining = True
            self._pass_on()
            self._park(parent)
        if not parent.forked:
            return
        assert parent.partitions is not None
        parent.partitions.join(parent, parent.forked)
        if observer.recorder is not None:
            observer.recorder.joined(parent, len(parent.forked))
        else:
            parent.partitions = None
        parent.partition, parent.forked = None, []

    def progress(self) -> None:
        """Something has changed: nobody is known to wait in vain."""
        self._polls, self._polling_s = 0, 0.0
        self._waited, self._ask_at = 0.0, LOST_S
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

    def take_turns_by_chance(self, task: Task) -> None:
        """Another program may go on, or begin, before ``task`` does, if turns are left to chance."""
        if chance is None or chance.random() >= SHARE_OF_TURNS:
            return
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
            TaskThread(target=self._work_when_given_the_baton, args=(task,), daemon=True).start()
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
        task.thread = threading.get_ident()
        tasks.running = task
        self.live.add(task)
        self.progress()
        try:
            # What a GPU does silently, numpy warns of. And what the simulator does with torch, conversions for example,
            # is not the host's use of it: a mode of torch's that watches that, as the sanitizer does, would take longer
            # than the program.
            with np.errstate(all="ignore"), hidden_from_modes():
                task.body()
                self.join(task)
                task.in_flight.write()
        except _Unwound:
            pass
        except BaseException as error:
            if observer.recorder is not None:
                observer.recorder.failed(error)
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(f"in program {task.index} of kernel {self.name!r}{hang.users_line(error)}")
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
        task.gate.acquire()
        tasks.running = task
        self.leave_if_failed()

    def _repeats(self) -> int:
        """How often every live program has looked at the same thing since it saw anything new."""
        live = [task for task in self.live if not task.joining]
        return min((max(task.repeated.values(), default=0) for task in live), default=0)

    def _polled(self) -> list[int]:
        """Where programs wait."""
        polls = [task.poll for task in self.live if task.poll is not None and task.poll.pointers.size]
        return [int(poll.pointers.flat[0]) for poll in polls]

    def _rest(self, task: Task) -> None:
        """Everyone polls in vain: let other launches and processes run until what someone looks at has changed."""
        start = time.monotonic()
        polled_s = start - self._polled_at
        again_at = start + max(LONGEST_UNCHANGED_S, LONGEST_UNCHANGED_ROUNDS * polled_s)
        self._waited += min(polled_s, self._polling_s)
        self._polls, self._polling_s = 0, 0.0
        live = [each for each in self.live if not each.joining]
        sees_the_same = tasks.looks_of(live)
        while True:
            self._leave_if_in_vain(live)
            self._sleep_without_baton(task)
            # To look costs less than a poll of each program does. But one that has just done something may be at work,
            # and look at a flag in passing. And the sanitizer counts polls, and notes them.
            if (
                observer.recorder is not None
                or self._error is not None
                or self._sleep < LONGEST_SLEEP_S
                or time.monotonic() >= again_at
                or not sees_the_same()
            ):
                break
        self._polled_at = time.monotonic()

    def _leave_if_in_vain(self, live: Sequence[Task]) -> None:
        """Leave the launch if these programs have waited for too long, or for somebody who is gone."""
        if self._waited >= self._ask_at:
            self._ask_at = self._waited + LOST_INTERVAL_S
            if lost := hang.lost(live, well=self._waited >= LEFT_S):
                self.fail(hang.lost_error(self.name, hang.waits(live, Launch._execute.__code__), lost))
                raise _Unwound
        deadlock = observer.recorder is not None and observer.recorder.is_over(self._repeats())
        if deadlock or (limit_s and self._waited >= limit_s):
            waits = hang.waits(live, Launch._execute.__code__)
            if observer.recorder is not None:
                for wait in waits:
                    observer.recorder.waits(self, wait)
            self.fail(hang.error(self.name, None if deadlock else limit_s, waits, hang.lost(live, well=True)))
            raise _Unwound
        for watcher in watchers:
            error = watcher(self._polled)
            if error is not None:
                self.fail(error)
                raise _Unwound

    def _sleep_without_baton(self, task: Task) -> None:
        start = time.monotonic()
        _baton.release()
        try:
            time.sleep(self._sleep)
        finally:
            self._waited += min(time.monotonic() - start, LONGEST_REST_S)
            _baton.acquire()
            tasks.running = task
        self._sleep = min(2 * self._sleep, LONGEST_SLEEP_S)
