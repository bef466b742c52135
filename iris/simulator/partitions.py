"""Who of a program's partitions may use which shared memory now: races between them, whatever order they run in.

What one partition writes, another may touch once it knows of that: from an mbarrier, which tells whoever waits for a
phase what those knew who arrived in it, and that the copies are there which signal it (PTX ISA, "Memory Consistency
Model", causality order). So each partition has a clock of what it knows, and each byte of shared memory has who wrote
it and who read it last. A mistake is found also if the scheduler happened to run the two in the order that was meant.

TMA and tensor cores read shared memory another way than threads write it, so there must be a fence between the two, on
either side (PTX ISA, "Async proxy"). Within a partition, recent compilers see to that.

Atomic operations on global memory, and small blocks of shared memory, may be flags: they are taken to order everything.
"""

import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from iris.simulator import hang

if TYPE_CHECKING:
    from iris.simulator.tasks import Task

_BELOW_KERNELS = (hang.SIMULATOR, hang.TRITON)

LARGEST_FLAG = 32
"""So many elements may be a flag that partitions poll; a larger block is data."""

Clock = dict[Hashable, int]
"""How much is known of each: of a partition, how often it has told something; of an mbarrier, its finished phases.

Of `Fenced(partition)`, how much of that has a fence behind it.
"""


class Fenced(NamedTuple):
    partition: "Task"


class Access(NamedTuple):
    """``who``: the partition, or the address of the mbarrier that tells of the access; ``when``: by their clock."""

    who: Hashable
    when: int
    partition: int | None
    verb: str
    place: str


@dataclass(eq=False)
class _Barrier:
    """What those knew who have arrived, and who arrived in finished phases; how many phases are finished."""

    told: Clock = field(default_factory=dict)
    finished: Clock = field(default_factory=dict)
    phases: int = 0


class _Marks:
    """Of one allocation: for each byte, the number of the access that wrote it, and of each partition's last read."""

    def __init__(self, memory: np.ndarray) -> None:
        self.memory = weakref.ref(memory)
        self._first, self._bytes = memory.ctypes.data, memory.nbytes
        self.written = self._none()
        self.read: defaultdict[Task, np.ndarray] = defaultdict(self._none)

    def _none(self) -> np.ndarray:
        return np.zeros(self._bytes, dtype=np.int32)

    def of(self, marks: np.ndarray, view: np.ndarray) -> np.ndarray:
        """Those of the bytes of ``view``, in place."""
        shape, size = (*view.shape, view.itemsize), marks.itemsize
        strides = (*(size * stride for stride in view.strides), size)
        return np.ndarray(shape, marks.dtype, marks, size * (view.ctypes.data - self._first), strides)


class Partitions:
    """Of one program, from `warp_specialize` until all its partitions are done."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._clocks: defaultdict[Task, Clock] = defaultdict(dict)
        self._barriers: defaultdict[int, _Barrier] = defaultdict(_Barrier)
        self._flags: Clock = {}
        self._marks: dict[int, _Marks] = {}
        self._accesses = [Access(None, 0, None, "", "")]  # number 0: nobody

    # What orders accesses -------------------------------------------------------------------------------------------

    def arrives(self, task: "Task", mbarrier: np.ndarray) -> None:
        self._tell(task, self._barriers[mbarrier.ctypes.data].told)

    def phase_ends(self, mbarrier: np.ndarray) -> None:
        barrier = self._barriers[mbarrier.ctypes.data]
        barrier.finished = dict(barrier.told)
        barrier.phases += 1

    def waited(self, task: "Task", mbarrier: np.ndarray) -> None:
        address = mbarrier.ctypes.data
        barrier, clock = self._barriers[address], self._clocks[task]
        _join(clock, barrier.finished)
        clock[address] = barrier.phases

    def meets(self, task: "Task") -> None:
        """``task`` uses what may be a flag."""
        _join(self._clocks[task], self._flags)
        self._tell(task, self._flags)

    def fences(self, task: "Task") -> None:
        clock = self._clocks[task]
        clock.setdefault(task, 1)
        clock |= {Fenced(who): when for who, when in clock.items() if isinstance(who, type(task))}
        clock[task] += 1  # what it writes from now on has no fence behind it

    def _tell(self, task: "Task", told: Clock) -> None:
        clock = self._clocks[task]
        clock.setdefault(task, 1)
        _join(told, clock)
        clock[task] += 1

    # What is accessed -----------------------------------------------------------------------------------------------

    def reads(self, task: "Task", view: np.ndarray) -> None:
        self.will_read(task, view, "reads", fenced=False)()

    def will_read(self, task: "Task", view: np.ndarray, verb: str, fenced: bool = True) -> Callable[[], None]:
        """What is to be called when a read has ended that begins now. ``fenced``: it wants a fence before it."""
        place = _place()

        def ended() -> None:
            marks, access = self._of(view), self._by(task, verb, place)
            self._check(task, marks.of(marks.written, view), access, fenced)
            marks.of(marks.read[task], view)[...] = self._note(access)

        return ended

    def writes(self, task: "Task", view: np.ndarray, verb: str = "writes", told: np.ndarray | None = None) -> None:
        """``told``: the mbarrier that tells of its end, of what the GPU writes beside the program."""
        marks, access = self._of(view), self._by(task, verb, _place())
        written = marks.of(marks.written, view)
        self._check(task, written, access)
        for reader, read in marks.read.items():
            if reader is not task:
                self._check(task, marks.of(read, view), access)
        if told is not None:
            address = told.ctypes.data
            access = access._replace(who=address, when=self._barriers[address].phases + 1)
        written[...] = self._note(access)

    def _by(self, task: "Task", verb: str, place: str) -> Access:
        return Access(task, self._clocks[task].setdefault(task, 1), task.partition, verb, place)

    def _note(self, access: Access) -> int:
        self._accesses.append(access)
        return len(self._accesses) - 1

    def _of(self, view: np.ndarray) -> _Marks:
        memory = view if view.base is None else view.base
        marks = self._marks.get(memory.ctypes.data)
        if marks is None or marks.memory() is not memory:
            marks = self._marks[memory.ctypes.data] = _Marks(memory)
        return marks

    def _check(self, task: "Task", marks: np.ndarray, access: Access, fenced: bool = False) -> None:
        clock, first = self._clocks[task], marks.flat[0]
        for number in (first,) if (marks == first).all() else np.unique(marks):
            earlier = self._accesses[number]
            if earlier.when > clock.get(earlier.who, 0):
                missing = "nothing orders the two: an mbarrier is not waited for, or lacks an arrival"
            elif fenced and earlier.verb == "writes" and earlier.who is not task and self._lacks_fence(clock, earlier):
                missing = "no fence_async_shared stands between the two"
            else:
                continue
            raise RuntimeError(
                f"a race in shared memory: partition {access.partition} {access.verb} at {access.place} what "
                f"partition {earlier.partition} {earlier.verb} at {earlier.place}, and {missing}"
            )

    @staticmethod
    def _lacks_fence(clock: Clock, access: Access) -> bool:
        return access.when > clock.get(Fenced(access.who), 0)


def _join(clock: Clock, other: Clock) -> None:
    for who, when in other.items():
        if clock.get(who, 0) < when:
            clock[who] = when


def _place() -> str:
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_BELOW_KERNELS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
