"""The task that runs now, and how it shows that it may be waiting.

A *task* is a program of a launch, or a partition of one (`gl.warp_specialize`). One task runs at a time: `running`.
The operations of a kernel ask here which one that is, and report what they have found in memory (`observe`,
`observe_plain_load`).

A task *polls* if it finds in memory what it found there before. It may then be waiting, so another task should have a
turn. Which one gets it, `iris.simulator.grid` decides.
"""

import threading
from _thread import LockType
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import triton.language as tl

from iris import observer
from iris.compat.libtriton import load
from iris.simulator.asynchronous import Groups, InFlight
from iris.simulator.shared_memory import SharedMemoryChecker

# How many observations a task remembers: more than any loop polls in turn.
REMEMBERED = 1 << 14

# A plain load (neither atomic nor volatile) may look at flags too:
# * if it has so many elements at most,
MOST_FLAGS = 1024
# * and once it has found the same values so many times, which then count as one poll.
LOADS_OF_A_POLL = 1000
# So much of the time since the poll before may count as waiting: 1 ms for each load. A program that merely happens to
# load the same again is at work in between.
LONGEST_LOADS_S = 1.0


def closed_gate() -> LockType:
    """A lock to wait at: one thread acquires it, another opens it by releasing it."""
    gate = threading.Lock()
    gate.acquire()
    return gate


class Condition(NamedTuple):
    """What ends a wait: a flag of so many bits that compares as ``cmp`` to ``wanted``, see `DeviceContext.wait`."""

    cmp: str
    wanted: int
    bits: int
    returned: bool = False
    """Whether the wait returns the flag's final value, so that its caller may rely on that very value."""
    ranks: int | None = None
    """In a barrier: how many flags there are, one for each rank."""


@dataclass(frozen=True)
class Poll:
    """What a task found when it looked at memory again and nothing had changed."""

    operation: str
    pointers: np.ndarray
    values: np.ndarray
    element: tl.dtype
    expected: np.ndarray | None
    waits_for: str | None


class Launch(Protocol):
    """The part of `iris.simulator.grid.Launch` that tasks and operations use."""

    name: str
    dims: tuple[int, int, int]
    cluster_exchanges: dict[int, Any]

    def leave_if_failed(self) -> None: ...
    def fork(self, parent: "Task", bodies: Sequence[Callable[[], None]], num_warps: Sequence[int]) -> None: ...
    def join(self, parent: "Task") -> None: ...
    def progress(self) -> None: ...
    def let_others_run(self, task: "Task", longest_s: float = ...) -> None: ...
    def take_turns_by_chance(self, task: "Task") -> None: ...
    def let_waiting_run(self, task: "Task") -> None: ...


@dataclass(eq=False)
class Task:
    """A program, or a partition of one, and the thread that it runs on."""

    launch: Launch
    index: tuple[int, int, int]
    body: Callable[[], None]
    num_warps: int

    # Partitions.
    parent: "Task | None" = None
    partition: int | None = None
    """Its number: 0 for the default partition, which runs on the program's own warps; None if there are none."""
    checker: SharedMemoryChecker | None = None
    """Of a program: the race detector of its shared memory, if it has one."""
    forked: "list[Task]" = field(default_factory=list)
    """The program's partitions but the default one, from `fork` to `join`."""
    children: int = 0
    """How many of ``forked`` have not finished."""
    joining: bool = False
    """Whether it is parked until they have."""

    # Its thread.
    thread: int = 0
    gate: LockType = field(default_factory=closed_gate)
    """Opened by the thread that hands it the baton."""

    # Asynchronous operations.
    in_flight: InFlight = field(default_factory=InFlight)
    operation: tuple | None = None
    """For the recorder: the asynchronous operation that it carries out now. The place where it was issued, and the
    numbers of its launch and of itself."""
    async_proxy: bool = False
    """Whether its accesses are now those of TMA, by the async proxy."""

    # What `iris.simulator.noted` has learned of the operation that it does now.
    dropped: bool = False
    """Nobody uses what the operation returns."""
    message: bool = False
    """The next access is of data that contain their own flag (LL and Lamport protocols)."""
    condition: Condition | None = None
    """What ends the wait that it is in."""
    spinning: bool = False
    """It is in a loop of the user's that only a change of memory can end."""
    library_loads: bool = False
    """Within such a loop, the library loads something for itself, such as the address of a peer's memory."""

    # How it shows that it waits: see `observe`. A key is an operation and the hash of its pointers.
    last_values: dict[tuple[str, int], int] = field(default_factory=dict)
    """By key, the hash of the values that were found last."""
    repeats: Counter[tuple[str, int]] = field(default_factory=Counter)
    """How often each was found unchanged, since the task last saw anything new."""
    polls: dict[tuple[str, int], Poll] = field(default_factory=dict)
    """What was found there."""
    poll: Poll | None = None
    """The latest of these."""

    # The same for plain loads: see `observe_plain_load`.
    plain_loads: Counter[int] = field(default_factory=Counter)
    """How often it has loaded the same values from the same addresses, by the hash of both."""
    stores: bool = False
    """Whether it has stored anything since plain loads last counted as a poll."""

    def run(self) -> None:
        """Run the body. The lines of a kernel are looked for from the innermost frame to this one's."""
        self.body()

    @property
    def program(self) -> "Task":
        """The task of the whole program, whose partition this is or which it is itself."""
        return self.parent or self

    @property
    def text(self) -> str:
        """Which one it is, in words."""
        return f"partition {self.partition} of " * bool(self.partition) + f"program {self.index}"

    @property
    def partitioned(self) -> bool:
        """Whether it shares its program's shared memory with another task."""
        return self.partition is not None


def memory_unchanged(polling: Iterable[Task]) -> Callable[[], bool]:
    """A function that says whether each of these tasks would, by polling again, find what it has found already.

    One call of it costs less than a poll. Polls whose values do not lie at their pointers count as unchanged.
    """
    found: dict[np.dtype, list[Poll]] = defaultdict(list)
    for task in polling:
        if not task.polls:
            return lambda: False
        for poll in task.polls.values():
            if poll.pointers.size == poll.values.size:
                found[poll.values.dtype].append(poll)
    parts = []
    for dtype, polls in found.items():
        pointers = np.concatenate([poll.pointers.reshape(-1) for poll in polls])
        values = np.concatenate([poll.values.reshape(-1) for poll in polls])
        parts.append((pointers, np.ones(pointers.size, dtype=bool), np.zeros_like(values), dtype, values.tobytes()))
    return lambda: all(load(*where).tobytes() == values for *where, values in parts)


running: Task | None = None
"""The task that has the baton. Its launch assigns this itself, without a function call: an interrupt that came in such
a function would be raised there, and the baton would be lost (`iris.simulator.interrupts`).
"""


def in_kernel() -> bool:
    """Whether a task runs on this thread now. (While a launch sleeps, the program's other threads go on.)"""
    return running is not None and running.thread == threading.get_ident()


def current() -> Task:
    """The task that runs now."""
    if running is None:
        raise RuntimeError("a kernel's operation was used outside a kernel")
    return running


def observe(
    operation: str,
    pointers: np.ndarray,
    values: np.ndarray,
    element: tl.dtype,
    changed: Callable[[], bool],
    expected: np.ndarray | None = None,
    waits_for: str | None = None,
) -> None:
    """Note that the current task has looked at memory by an operation that may be a poll. If nothing is new there, let
    others run.

    ``changed`` says whether the operation itself changed memory; it is asked only if it matters. ``waits_for`` says in
    words what is missing, where the values alone do not.
    """
    task = running
    if task is None:
        return
    task.launch.leave_if_failed()
    key, now = (operation, hash(pointers.tobytes())), hash(values.tobytes())
    if task.last_values.get(key) != now or changed():
        if len(task.last_values) >= REMEMBERED:
            task.last_values.clear()
        task.last_values[key] = now
        task.repeats.clear()
        task.polls.clear()
        task.launch.progress()
        task.launch.take_turns_by_chance(task)
        return
    task.poll = task.polls[key] = Poll(operation, pointers, values, element, expected, waits_for)
    task.repeats[key] += 1
    task.launch.let_others_run(task)


def observe_plain_load(pointers: np.ndarray, values: np.ndarray, element: tl.dtype) -> None:
    """Note that the current task has loaded these, neither atomically nor volatile.

    Most such loads are of data. But a task that loads the same values again and again may be waiting for another one.
    What the library loads for itself in a loop that waits, such as the address of a peer's heap, it does not wait for.
    """
    task = running
    if task is None or task.library_loads or not 0 < pointers.size <= MOST_FLAGS:
        return
    if len(task.plain_loads) >= REMEMBERED:
        task.plain_loads.clear()
    key = hash((pointers.tobytes(), values.tobytes()))
    task.plain_loads[key] += 1
    if task.plain_loads[key] == 1:
        task.launch.progress()
    elif task.plain_loads[key] % LOADS_OF_A_POLL == 0:
        task.launch.leave_if_failed()
        task.poll = Poll("plain loads", pointers, values, element, None, None)
        task.polls.clear()  # which of its loads it waits for is not known
        stores, task.stores = task.stores, False
        task.launch.let_others_run(task, 0.0 if stores else LONGEST_LOADS_S)


def stored() -> None:
    """Note that the current task has stored something: it is at work, however often it loads the same."""
    if running is not None:
        running.stores = True


def shared_memory_checker() -> tuple[SharedMemoryChecker | None, Task]:
    """The race detector of the current program's shared memory, if it has one; and the current task."""
    task = current()
    program = task.program
    if program.checker is None and observer.recorder is not None:
        program.checker = SharedMemoryChecker()
    return program.checker, task


def wait_for(groups: Groups, outstanding: int) -> None:
    """The current task waits for asynchronous operations that it has issued: see `Groups.wait`."""
    groups.wait(outstanding)
    checker, task = shared_memory_checker()
    if checker is not None:
        checker.groups_waited(task, groups)


def used_flags(words: np.ndarray, *, reads: bool = True, writes: bool, acquires: bool = True, releases: bool) -> None:
    """Note that the current task has read, or written, words that may be flags between partitions."""
    task = current()
    checker = task.program.checker
    if checker is None or not task.partitioned:
        return
    if reads:
        checker.flag_read(task, words, acquires)
    if writes:
        checker.flag_written(task, words, releases)


def fenced() -> None:
    """Note a fence of the current task, for global memory and the flags in it."""
    task = current()
    if task.program.checker is not None:
        task.program.checker.memory_fence(task)


def take_message() -> bool:
    """Whether the access that is done now was announced as one of data that contain their own flag."""
    task = current()
    message, task.message = task.message, False
    return message


def give_way() -> None:
    """Let the other partitions of the current program, and all other tasks that wait, run before it goes on."""
    task = running
    if task is not None and task.partitioned:
        task.launch.let_waiting_run(task)
