"""The scheduler: runs the programs of a launch, any of which may wait for another one, or for another process.

It is cooperative. One thread runs at a time: the one that holds the *baton*, a lock of the whole process. Threads
switch only where a program *polls*, that is, reads a flag again and finds it unchanged (`iris.simulator.tasks`).

1. The thread that launches runs one program after the other. So a launch whose programs never wait creates no thread.
2. A program that polls is *parked*: its thread stops there. Another thread goes on with a program that has not begun,
   or with the one that has been parked longest. Partitions (`gl.warp_specialize`) are tasks like programs.
3. If all programs have polled in vain, only another process, or another Python thread, can help. The scheduler then
   sleeps a little between rounds. Meanwhile the baton is free for launches from other threads.
4. If nothing has changed for `limit_s` seconds, the launch fails with an error that says which program waits for what
   (`iris.simulator.hang`).
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
from iris.simulator.lines import place_of_error
from iris.simulator.shared_memory import SharedMemoryChecker
from iris.simulator.tasks import Task, closed_gate

# Sleeps between two rounds of polls begin with the first, and double up to the second.
SHORTEST_SLEEP_S = 50e-6
LONGEST_SLEEP_S = 1e-3

# How much one poll may count towards the time limit. A program that works for minutes between two polls does not wait
# for minutes.
LONGEST_POLL_S = 5e-3
# How much one sleep may count. A process that was stopped meanwhile (SIGSTOP, Ctrl-Z) has not waited for so long.
LONGEST_COUNTED_SLEEP_S = 0.1

# While the flags that programs poll stay as they are, the programs need no turn. But their loops may also look at a
# clock or count rounds. So they have a turn after so many seconds, or so many times as long as a round of polls takes,
# whichever is longer.
LONGEST_UNCHANGED_S, LONGEST_UNCHANGED_ROUNDS = 5e-3, 8

limit_s: float = 30.0
"""How long a launch may wait without any change; 0 for ever. IRIS_WAIT_TIMEOUT_S replaces it at activation."""

watchers: list[Callable[[Callable[[], list[int]]], BaseException | None]] = []
"""Called while all programs of a launch wait, with a function that returns the addresses at which they do. If one
returns an error, the launch ends with it."""

chance: random.Random | None = None
"""For random schedules (``python -m iris check --seed``): picks whose turn it is, also where nobody waits."""

# In a random schedule: how often a program that has found something new lets another one run; and by how much a rank
# may begin a launch late.
SHARE_OF_TURNS = 0.25
LATEST_S = 2e-3

# After how long without any change a launch fails because a rank for which it may wait has died; because one has ended
# well, which takes longer, as another rank may still be at work on what it left; and how often that is looked up.
PEER_DIED_S, PEER_ENDED_S, PEERS_INTERVAL_S = 1.0, 2.0, 0.1

_baton = threading.Lock()


class TaskThread(threading.Thread):
    """A thread that a launch has started to run tasks. It is no thread of the user's program."""


class _Unwound(BaseException):
    """Raised in the programs of a launch that has failed, so that they leave their frames."""


def run(name: str, dims: tuple[int, int, int], num_warps: int, program: Callable[[], None]) -> None:
    """Run ``program`` once for each index of the grid; returns when all have finished.

    Launches from several threads take turns. A program may launch another kernel.

    Raises
    ------
    IrisTimeoutError
        All programs wait, and nothing has changed for `limit_s`.
    PeerLostError
        All programs wait, and a rank for which they may wait is gone.
    BaseException
        What a program raised, once the others have been unwound.
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
        self.cluster_exchanges: dict[int, Any] = {}  # by the number of the cluster: `iris.simulator.cluster`
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
        """Run all programs, beginning on this thread; returns when the last one has ended, on whatever thread."""
        self._work(self._pop_new_task())
        self._finished.acquire()

    def fail(self, error: BaseException) -> None:
        """End the launch with ``error``: programs leave at their next access that may be a wait."""
        self._error = self._error or error

    def raise_error(self) -> None:
        """Raise the error with which the launch has failed, if it has."""
        error, self._error = self._error, None  # its traceback holds this launch: no cycle is to keep both
        if error is not None:
            try:
                raise error
            finally:
                del error

    def leave_if_failed(self) -> None:
        """Leave the program that runs if its launch has failed."""
        if self._error is not None:
            raise _Unwound

    def fork(self, parent: Task, bodies: Sequence[Callable[[], None]], num_warps: Sequence[int]) -> None:
        """Add partitions that run beside ``parent``; `join` waits for them."""
        children = [
            Task(self, parent.index, body, warps, parent, number)
            for number, (body, warps) in enumerate(zip(bodies, num_warps, strict=True), 1)
        ]
        parent.partition, parent.checker, parent.forked = 0, parent.checker or SharedMemoryChecker(), children
        parent.checker.fork(parent, children)
        parent.children += len(children)
        self._partitions.extend(children)
        if observer.recorder is not None:
            observer.recorder.forked(parent, len(bodies))

    def join(self, parent: Task) -> None:
        """Wait until the partitions of ``parent`` have ended, if it has any."""
        if parent.children:
            parent.joining = True
            self._pass_on()
            self._park(parent)
        if not parent.forked:
            return
        assert parent.checker is not None
        parent.checker.join(parent, parent.forked)
        if observer.recorder is not None:
            observer.recorder.joined(parent, len(parent.forked))
        else:
            parent.checker = None
        parent.partition, parent.forked = None, []

    def progress(self) -> None:
        """Something has changed, so the time limit starts anew."""
        # Polls of this round, and how much of the time since the last round they may have taken.
        self._polls, self._polling_s = 0, 0.0
        # For how long nothing has changed; when to ask next whether a peer is gone.
        self._waited, self._ask_at = 0.0, PEER_DIED_S
        self._round_began = time.monotonic()
        self._sleep = SHORTEST_SLEEP_S

    def let_others_run(self, task: Task, longest_s: float = LONGEST_POLL_S) -> None:
        """``task`` has polled in vain. Returns when it is its turn again.

        ``longest_s``: how much of the time since the last round this may count towards the time limit.
        """
        self._polls += 1
        self._polling_s += longest_s
        if self._begin_another(task):
            return
        if self._polls > len(self._parked):  # all others have polled in vain since anything changed
            self._wait_for_change(task)
        self._resume_another(task)

    def take_turns_by_chance(self, task: Task) -> None:
        """In a random schedule, another program may begin or go on before ``task`` does."""
        if chance is not None and chance.random() < SHARE_OF_TURNS and not self._begin_another(task):
            self._resume_another(task)

    def let_waiting_run(self, task: Task) -> None:
        """All parked tasks have a turn, and all partitions that have not begun. Programs that have not begun do not."""
        self.progress()
        if self._partitions:
            self._begin_on_new_thread(self._partitions.popleft(), task)
            self._park(task)
        elif self._parked:
            self._parked.append(task)
            self._parked.popleft().gate.release()
            self._park(task)

    def _begin_another(self, task: Task) -> bool:
        """Park ``task`` while a task begins that has not, if there is one; returns whether there was."""
        starting = self._pop_new_task()
        if starting is not None:
            self._begin_on_new_thread(starting, task)
            self._park(task)
        return starting is not None

    def _resume_another(self, task: Task) -> None:
        """Park ``task`` while another parked one goes on, if there is one."""
        if self._parked:
            self._parked.append(task)
            self._pass_on()
            self._park(task)

    # Tasks and threads ----------------------------------------------------------------------------------------------

    def _pop_new_task(self) -> Task | None:
        """A task that has not begun, partitions first; None if there is none, or if the launch has failed."""
        if self._error is not None:
            while self._partitions:
                self._finish(self._partitions.popleft())
            return None
        return self._partitions.popleft() if self._partitions else next(self._programs, None)

    def _pass_on(self) -> None:
        """Give the baton to a task that has not begun, or to the one that has been parked longest."""
        starting = self._pop_new_task()
        if starting is not None:
            self._begin_on_new_thread(starting)
        elif self._parked:
            if chance is not None:
                self._parked.rotate(chance.randrange(len(self._parked)))
            self._parked.popleft().gate.release()
        else:
            self._finished.release()

    def _begin_on_new_thread(self, task: Task, parking: Task | None = None) -> None:
        """Start a thread for ``task`` and give it the baton. ``parking``: the task that will wait for its next turn."""
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
            task = self._pop_new_task()
        self._pass_on()

    def _execute(self, task: Task) -> None:
        """Run ``task`` from its beginning to its end. This frame lies below all frames of the kernel."""
        task.thread = threading.get_ident()
        tasks.running = task
        self.live.add(task)
        self.progress()
        try:
            # numpy warns of overflows and the like, a GPU does not. And a torch mode that watches the host, such as the
            # sanitizer's, is not to see what the simulator does with torch: that would take longer than the program.
            with np.errstate(all="ignore"), hidden_from_modes():
                task.run()
                self.join(task)
                task.in_flight.write()
        except _Unwound:
            pass
        except BaseException as error:
            if observer.recorder is not None:
                observer.recorder.failed(error)
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(f"in program {task.index} of kernel {self.name!r}{place_of_error(error)}")
            self.fail(error)
        self.live.discard(task)
        self._finish(task)
        self.progress()

    def _finish(self, task: Task) -> None:
        """``task`` is over. If it was the last partition for which its program waits, that program may go on."""
        parent = task.parent
        if parent is not None:
            parent.children -= 1
            if parent.joining and parent.children == 0:
                parent.joining = False
                self._parked.append(parent)

    def _park(self, task: Task) -> None:
        """Stop this thread until another one opens the gate of ``task``. Before, give the baton to another task."""
        task.gate.acquire()
        tasks.running = task
        self.leave_if_failed()

    def _least_repeats(self) -> int:
        """How often every live program, at least, has found the same flag unchanged since it saw anything new."""
        live = [task for task in self.live if not task.joining]
        return min((max(task.repeats.values(), default=0) for task in live), default=0)

    def _polled_addresses(self) -> list[int]:
        """The first address of each program's latest poll."""
        polls = [task.poll for task in self.live if task.poll is not None and task.poll.pointers.size]
        return [int(poll.pointers.flat[0]) for poll in polls]

    def _wait_for_change(self, task: Task) -> None:
        """All programs have polled in vain. Let other launches and processes run until a polled flag has changed."""
        start = time.monotonic()
        round_s = start - self._round_began
        poll_at = start + max(LONGEST_UNCHANGED_S, LONGEST_UNCHANGED_ROUNDS * round_s)
        self._waited += min(round_s, self._polling_s)
        self._polls, self._polling_s = 0, 0.0
        live = [each for each in self.live if not each.joining]
        unchanged = tasks.memory_unchanged(live)
        while True:
            self._fail_if_in_vain(live)
            self._sleep_without_baton(task)
            # While the flags are unchanged, sleep on: to compare them costs less than to let each program poll. But
            # under the sanitizer each program polls, as that counts the polls. And so it does while sleeps are short: a
            # program that has just done something may be at work, and look at the flag in passing.
            if (
                observer.recorder is not None
                or self._error is not None
                or self._sleep < LONGEST_SLEEP_S
                or time.monotonic() >= poll_at
                or not unchanged()
            ):
                break
        self._round_began = time.monotonic()

    def _fail_if_in_vain(self, live: Sequence[Task]) -> None:
        """Fail if these programs have waited for too long, if nobody can help them, or if a peer is gone."""
        if self._waited >= self._ask_at:
            self._ask_at = self._waited + PEERS_INTERVAL_S
            if gone := hang.gone_peers(live, ended_well=self._waited >= PEER_ENDED_S):
                self.fail(hang.peer_lost_error(self.name, hang.waits(live, Launch._execute.__code__), gone))
                raise _Unwound
        deadlock = observer.recorder is not None and observer.recorder.is_deadlocked(self._least_repeats())
        if deadlock or (limit_s and self._waited >= limit_s):
            waits = hang.waits(live, Launch._execute.__code__)
            if observer.recorder is not None:
                for wait in waits:
                    observer.recorder.waits(self, wait)
            gone = hang.gone_peers(live, ended_well=True)
            self.fail(hang.timeout_error(self.name, None if deadlock else limit_s, waits, gone))
            raise _Unwound
        for watcher in watchers:
            error = watcher(self._polled_addresses)
            if error is not None:
                self.fail(error)
                raise _Unwound

    def _sleep_without_baton(self, task: Task) -> None:
        start = time.monotonic()
        _baton.release()
        try:
            time.sleep(self._sleep)
        finally:
            self._waited += min(time.monotonic() - start, LONGEST_COUNTED_SLEEP_S)
            _baton.acquire()
            tasks.running = task
        self._sleep = min(2 * self._sleep, LONGEST_SLEEP_S)
