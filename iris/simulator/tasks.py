"""The task that runs, a program or one of its partitions, and how it shows that it may be waiting.

The operations of a kernel ask here whose they are, and say what they have looked at and found there. Who finds the same
again polls, and another should have its turn: whose that is, `iris.simulator.grid` decides.
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
from iris.simulator.partitions import Partitions

# How many observations a task remembers: more than any loop polls in turn.
REMEMBERED = 1 << 14

# Plain loads of so many elements at most may look at flags, how many of the same make a poll, and the time that such a
# one may add to the count: 1 ms for each load, since who only happens to load the same again is at work in between.
MOST_FLAGS, LOOKS_OF_A_POLL, LONGEST_LOOKS_S = 1024, 1000, 1.0


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
    """Whether who waits may use what the flag holds then: it may count on that value."""
    ranks: int | None = None
    """Of a barrier: how many flags there are, one a rank."""


@dataclass(frozen=True)
class Poll:
    """What a program saw when it looked at memory again and found it unchanged."""

    operation: str
    pointers: np.ndarray
    values: np.ndarray
    element: tl.dtype
    expected: np.ndarray | None
    waits_for: str | None


class Launch(Protocol):
    """What a task knows of the launch that it is of: `iris.simulator.grid.Launch`."""

    name: str
    dims: tuple[int, int, int]
    meetings: dict[int, Any]

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
    parent: "Task | None" = None
    partition: int | None = None
    """Which one of its program: 0 is the default one, that of the program's own warps; None if there is one only."""
    partitions: Partitions | None = None
    """What it does to shared memory, if that is looked at."""
    forked: "list[Task]" = field(default_factory=list)
    """Its partitions, other than the default one, until it has joined them; ``children``: those that run."""
    children: int = 0
    joining: bool = False
    thread: int = 0
    gate: LockType = field(default_factory=closed_gate)
    seen: dict[tuple[str, int], int] = field(default_factory=dict)
    issued_at: tuple | None = None  # of what a GPU does beside the program: where it was asked for, and by whom
    async_proxy: bool = False  # what it accesses now, TMA does, and not its threads
    # Of what it does now (`iris.simulator.noted`): whether nobody uses what the operation returns, whether the next
    # access is of data that carry their own arrival, and what ends the wait that it is in; whether it is in a loop of
    # the user's that spins, and whether the library looks up something for itself there, as where a peer's memory is.
    dropped: bool = False
    message: bool = False
    condition: Condition | None = None
    spinning: bool = False
    looks_up: bool = False
    poll: Poll | None = None
    repeated: Counter[tuple[str, int]] = field(default_factory=Counter)
    """What it has looked at since it saw anything new, and how often; ``polls``: what it saw there."""
    polls: dict[tuple[str, int], Poll] = field(default_factory=dict)
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
    def text(self) -> str:
        """Which one it is, in words."""
        return f"partition {self.partition} of " * bool(self.partition) + f"program {self.index}"

    @property
    def partitioned(self) -> bool:
        """Whether it shares its program's shared memory with another task."""
        return self.partition is not None


def looks_of(polling: Iterable[Task]) -> Callable[[], bool]:
    """Whether each of them polls, and memory still holds all that it has found since it saw anything new.

    A function that says so for one moment, at less cost than a poll. What lies nowhere word by word has not changed.
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
"""The task that has the baton. Its launch assigns this, and calls no function for it: an interrupt that came in there
would be raised, and lose the baton (`iris.simulator.interrupts`).
"""


def in_kernel() -> bool:
    """Whether a task runs now, on this thread: while a launch rests, others of Python's go on."""
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
    """Note that the current program has looked at memory, and let others run if it saw nothing new.

    ``changed`` says whether the operation itself changed memory; it is asked only if it matters. ``waits_for`` says in
    words what is missing, where the values alone do not.
    """
    task = running
    if task is None:
        return
    task.launch.leave_if_failed()
    key, now = (operation, hash(pointers.tobytes())), hash(values.tobytes())
    if task.seen.get(key) != now or changed():
        if len(task.seen) >= REMEMBERED:
            task.seen.clear()
        task.seen[key] = now
        task.repeated.clear()
        task.polls.clear()
        task.launch.progress()
        task.launch.take_turns_by_chance(task)
        return
    task.poll = task.polls[key] = Poll(operation, pointers, values, element, expected, waits_for)
    task.repeated[key] += 1
    task.launch.let_others_run(task)


def looked(pointers: np.ndarray, values: np.ndarray, element: tl.dtype) -> None:
    """Note that the current program has loaded these, without saying that they may change meanwhile.

    Who loads the same so often may wait for a program that has not had its turn, or for nobody.
    """
    task = running
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
        task.polls.clear()  # which of its loads it waits for is not known
        stores, task.stores = task.stores, False
        task.launch.let_others_run(task, 0.0 if stores else LONGEST_LOOKS_S)


def stored() -> None:
    """Note that the current program has stored something: it is at work, however often it loads the same."""
    if running is not None:
        running.stores = True


def sharing() -> tuple[Partitions | None, Task]:
    """What the current program does to shared memory, if that is looked at; the current task."""
    task = current()
    program = task.program
    if program.partitions is None and observer.recorder is not None:
        program.partitions = Partitions()
    return program.partitions, task


def wait_for(groups: Groups, outstanding: int) -> None:
    """The current task waits for what it has issued, see `Groups.wait`."""
    groups.wait(outstanding)
    partitions, task = sharing()
    if partitions is not None:
        partitions.awaited(task, groups)


def used_flags(words: np.ndarray, *, reads: bool = True, writes: bool, acquires: bool = True, releases: bool) -> None:
    """Note that the current task has read, or written, words that may be flags of partitions."""
    task = current()
    partitions = task.program.partitions
    if partitions is None or not task.partitioned:
        return
    if reads:
        partitions.acquires(task, words, acquires)
    if writes:
        partitions.releases(task, words, releases)


def fenced() -> None:
    """Note that the current task orders what it has done to flags, and to all else in global memory."""
    task = current()
    if task.program.partitions is not None:
        task.program.partitions.orders(task)


def take_message() -> bool:
    """Whether the access that is done now is of data that carry their own arrival."""
    task = current()
    message, task.message = task.message, False
    return message


def give_way() -> None:
    """Let the partitions of the current program, and who else waits, go on before it does."""
    task = running
    if task is not None and task.partitioned:
        task.launch.let_waiting_run(task)
