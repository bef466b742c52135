"""A race detector for the shared memory of one program.

Three parties access that memory: the program, its partitions (`gl.warp_specialize`), and the asynchronous operations
that these have issued (TMA, cp.async, wgmma). The detector uses vector clocks and shadow memory:

* Each partition has a vector clock: what happens before its next access.
* Each byte has the last access that wrote it, and the last read of each reader.
* A second access to a byte must come after the first one by the clocks. So a race is found even if the scheduler
  happened to run the two in the order that was meant.

What orders accesses:

1. An mbarrier. A wait for a phase comes after all arrivals in that phase, and after the copies that signal it (PTX ISA,
   "Memory Consistency Model", causality order).
2. A wait for asynchronous operations, such as ``wait_group``. It comes after these operations.
3. A flag in global memory, as its atomic operations ask for: release, acquire, or relaxed with a fence.
4. A small block of shared memory, which may be a flag too. A store to it releases and a load of it acquires.

TMA and tensor cores access shared memory through the async proxy, and threads through the generic one. So a fence must
stand between a thread's write and such a read by another partition (PTX ISA, "Async proxy"). Within a partition, recent
compilers insert it.

`tasks.shared_memory_checker` makes the detector. Programs with partitions always have one, and a race is then an error.
Other programs have one while the sanitizer records, and a race is then one of its findings.
"""

import sys
import weakref
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from iris import observer
from iris.errors import SharedMemoryRaceError
from iris.simulator.asynchronous import Groups
from iris.simulator.folders import SIMULATOR, TRITON

_BELOW_KERNELS = (SIMULATOR, TRITON)

LARGEST_FLAG = 32
"""A block of at most so many elements may be a flag that partitions poll. A larger one is data."""

WORD = 4
"""Bytes of the words by which flags are told apart."""

Clock = dict[Hashable, int]
"""A vector clock. Its components, and what each counts:

* a `Task`: how often that partition has released something;
* the address of an mbarrier: its finished phases;
* a `Groups`: how many of its groups of asynchronous operations are complete;
* a `Fenced`: as its partition, but only up to the last proxy fence.
"""


class Task(Hashable, Protocol):
    """The part of `iris.simulator.tasks.Task` that is used here."""

    partition: int | None


class Fenced(NamedTuple):
    """The component of a partition's accesses that have a proxy fence after them."""

    partition: Hashable


class Access(NamedTuple):
    """It is over for everybody whose clock has at least ``tick`` in the component ``component``.

    ``component``: the partition; of an asynchronous operation, what signals its end: the address of an mbarrier or the
    operation's `Groups`. ``place``: the line, as the recorder's number or, without a recorder, as text.
    """

    component: Hashable
    tick: int
    partition: int | None
    verb: str
    place: Any


@dataclass(eq=False)
class _Mbarrier:
    """``arrived``: the joined clocks of all arrivals. ``finished``: those of finished phases, which waits acquire."""

    arrived: Clock = field(default_factory=dict)
    finished: Clock = field(default_factory=dict)
    phases: int = 0


class _Shadow:
    """The shadow memory of one allocation. Per byte: the number of its last write, and of each reader's last read."""

    def __init__(self, memory: np.ndarray) -> None:
        self.memory = weakref.ref(memory)
        self._first, self._bytes = memory.ctypes.data, memory.nbytes
        self.last_write = self._zeros()
        self.last_reads: defaultdict[Hashable, np.ndarray] = defaultdict(self._zeros)

    def _zeros(self) -> np.ndarray:
        return np.zeros(self._bytes, dtype=np.int32)

    def part(self, numbers: np.ndarray, view: np.ndarray) -> np.ndarray:
        """A view of the elements of ``numbers``, one of the arrays here, that are of the bytes of ``view``."""
        shape, size = (*view.shape, view.itemsize), numbers.itemsize
        strides = (*(size * stride for stride in view.strides), size)
        return np.ndarray(shape, numbers.dtype, numbers, size * (view.ctypes.data - self._first), strides)


class SharedMemoryChecker:
    """The race detector of one program, from its first access to shared memory, or its first `warp_specialize`, on."""

    def __init__(self) -> None:
        self._clocks: defaultdict[Task, Clock] = defaultdict(dict)
        self._mbarriers: defaultdict[int, _Mbarrier] = defaultdict(_Mbarrier)
        # By word: the clocks that were released into it.
        self._flags: defaultdict[int, Clock] = defaultdict(dict)
        # A relaxed write releases the clock of the last fence. The next fence acquires what relaxed reads have found.
        self._at_fence: defaultdict[Task, Clock] = defaultdict(dict)
        self._relaxed_reads: defaultdict[Task, Clock] = defaultdict(dict)
        self._shadows: dict[int, _Shadow] = {}
        # Number 0 is of bytes that nobody has accessed.
        nobody = Access(None, 0, None, "", "")
        self._accesses, self._numbers = [nobody], {nobody: 0}

    # What orders accesses -------------------------------------------------------------------------------------------

    def fork(self, parent: Task, children: Sequence[Task]) -> None:
        """``children`` begin after what ``parent`` has done so far, and need no proxy fence of their own for it."""
        self.proxy_fence(parent)
        for child in children:
            self._clocks[child] = dict(self._clocks[parent])
        self._clocks[parent][parent] += 1

    def join(self, parent: Task, children: Sequence[Task]) -> None:
        """``parent`` goes on after all that ``children`` have done."""
        for child in children:
            _join(self._clocks[parent], self._clocks.pop(child, {}))

    def mbarrier_arrive(self, task: Task, mbarrier: np.ndarray) -> None:
        self._clocks[task].setdefault(task, 1)
        _join(self._mbarriers[mbarrier.ctypes.data].arrived, self._clocks[task])
        self._advance(task)

    def mbarrier_phase_end(self, mbarrier: np.ndarray) -> None:
        state = self._mbarriers[mbarrier.ctypes.data]
        state.finished = dict(state.arrived)
        state.phases += 1

    def mbarrier_waited(self, task: Task, mbarrier: np.ndarray) -> None:
        """``task`` has waited for the latest phase that is finished."""
        address = mbarrier.ctypes.data
        state, clock = self._mbarriers[address], self._clocks[task]
        _join(clock, state.finished)
        clock[address] = state.phases

    def groups_waited(self, task: Task, groups: Groups) -> None:
        """``task`` has waited for operations that it has issued: ``groups.over`` of its groups."""
        self._clocks[task][groups] = groups.over

    def groups_arrive(self, groups: Groups, completed: int, mbarrier: np.ndarray) -> None:
        """So many groups of asynchronous operations are complete, and arrive at the mbarrier."""
        _join(self._mbarriers[mbarrier.ctypes.data].arrived, {groups: completed})

    def flag_written(self, task: Task, words: np.ndarray, releases: bool) -> None:
        """``task`` has written flags. A write that is no release releases what came before the last fence."""
        for word in _words(words):
            if releases:
                _join(self._flags[word], self._clocks[task])
            elif self._at_fence[task]:
                _join(self._flags[word], self._at_fence[task])
        if releases:
            self._advance(task)

    def flag_read(self, task: Task, words: np.ndarray, acquires: bool) -> None:
        """``task`` has read flags. What a read that is no acquire has found, the next fence acquires."""
        for word in _words(words):
            if word in self._flags:
                _join(self._clocks[task] if acquires else self._relaxed_reads[task], self._flags[word])

    def memory_fence(self, task: Task) -> None:
        """A fence of ``task`` for global memory, flags included."""
        _join(self._clocks[task], self._relaxed_reads.pop(task, {}))
        self._clocks[task].setdefault(task, 1)
        self._at_fence[task] = dict(self._clocks[task])
        self._advance(task)

    def proxy_fence(self, task: Task) -> None:
        """A fence of ``task`` between the generic proxy and the async one."""
        clock = self._clocks[task]
        clock.setdefault(task, 1)
        clock |= {Fenced(component): tick for component, tick in clock.items() if isinstance(component, type(task))}
        clock[task] += 1  # what it writes from now on has no fence after it

    def _advance(self, task: Task) -> None:
        clock = self._clocks[task]
        clock[task] = clock.get(task, 1) + 1

    # What is accessed -----------------------------------------------------------------------------------------------

    def reads(
        self, task: Task, view: np.ndarray, verb: str = "reads", groups: Groups | None = None, index: Any = ...
    ) -> None:
        """``task`` reads ``view[index]``. ``groups``: what signals the end of an asynchronous read (async proxy)."""
        shadow, access = self._shadow_of(view), self._access(task, verb)
        self._check(task, shadow.part(shadow.last_write, view)[index], access, by_async_proxy=groups is not None)
        if groups is not None:
            access = access._replace(component=groups, tick=groups.number)
        shadow.part(shadow.last_reads[access.component], view)[index] = self._number(access)

    def writes(
        self,
        task: Task,
        view: np.ndarray,
        verb: str = "writes",
        completion: np.ndarray | Groups | None = None,
        index: Any = ...,
    ) -> None:
        """``task`` writes ``view[index]``. ``completion``: what signals the end of an asynchronous write."""
        shadow, access = self._shadow_of(view), self._access(task, verb)
        last_write = shadow.part(shadow.last_write, view)
        self._check(task, last_write[index], access)
        for reader, last_read in shadow.last_reads.items():
            if reader is not task:
                self._check(task, shadow.part(last_read, view)[index], access)
        if isinstance(completion, np.ndarray):
            address = completion.ctypes.data
            access = access._replace(component=address, tick=self._mbarriers[address].phases + 1)
        elif completion is not None:
            access = access._replace(component=completion, tick=completion.number)
        last_write[index] = self._number(access)

    def _access(self, task: Task, verb: str) -> Access:
        place = _place() if observer.recorder is None else observer.recorder.place()
        return Access(task, self._clocks[task].setdefault(task, 1), task.partition, verb, place)

    def _number(self, access: Access) -> int:
        """The number by which shadow memory names it; equal accesses have the same."""
        number = self._numbers.setdefault(access, len(self._accesses))
        if number == len(self._accesses):
            self._accesses.append(access)
        return number

    def _shadow_of(self, view: np.ndarray) -> _Shadow:
        memory = view if view.base is None else view.base
        shadow = self._shadows.get(memory.ctypes.data)
        # Another allocation may have had this address before.
        if shadow is None or shadow.memory() is not memory:
            shadow = self._shadows[memory.ctypes.data] = _Shadow(memory)
        return shadow

    def _check(self, task: Task, numbers: np.ndarray, access: Access, by_async_proxy: bool = False) -> None:
        """Report each of the earlier accesses in ``numbers`` that does not come before ``access``, by ``task``."""
        clock, first = self._clocks[task], numbers.flat[0]
        for number in (first,) if (numbers == first).all() else np.unique(numbers):
            earlier = self._accesses[number]
            if earlier.tick > clock.get(earlier.component, 0):
                if isinstance(earlier.component, type(task)):
                    missing = "an mbarrier is not waited for, or lacks an arrival"
                else:
                    missing = "nobody has waited for the end of the first"
                self._report("race", earlier, access, missing)
            elif by_async_proxy and earlier.verb == "writes" and earlier.component is not task:
                if earlier.tick > clock.get(Fenced(earlier.component), 0):
                    missing = "no fence_async_shared stands between the two"
                    self._report("race/missing-proxy-fence", earlier, access, missing)

    @staticmethod
    def _report(kind: str, earlier: Access, access: Access, missing: str) -> None:
        """The sanitizer notes a race, and the program goes on. Without the sanitizer the program ends here."""
        if observer.recorder is not None:
            first, second = ((each.partition, each.verb, each.place) for each in (earlier, access))
            observer.recorder.shared_race(kind, first, second, missing)
            return
        raise SharedMemoryRaceError(
            f"a race in shared memory: partition {access.partition} {access.verb} at {access.place} what "
            f"partition {earlier.partition} {earlier.verb} at {earlier.place}, and nothing orders the two: {missing}"
        )


def _join(clock: Clock, other: Clock) -> None:
    """The maximum of both by component, in place."""
    for component, tick in other.items():
        if clock.get(component, 0) < tick:
            clock[component] = tick


def _words(addresses: np.ndarray) -> list[int]:
    return np.unique(np.ravel(addresses).astype(np.int64) // WORD).tolist()


def _place() -> str:
    """The kernel's line that is being done, as ``file:line``."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_BELOW_KERNELS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
