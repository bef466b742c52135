"""Who of a program may use which shared memory now: its partitions, and the copies and products that they have issued.

What one of them writes, another may touch once it knows of that: a partition from an mbarrier, which brings whoever
waits for a phase what those knew who arrived in it, and that the copies are there which signal it (PTX ISA, "Memory
Consistency Model", causality order); of what it has issued, from a wait for that. So each partition has a clock of what
it knows, and each byte of shared memory has who wrote it and who read it last. A mistake is found also if the scheduler
happened to run the two in the order that was meant.

TMA and tensor cores read shared memory another way than threads write it, so there must be a fence between the two, on
either side (PTX ISA, "Async proxy"). Within a partition, recent compilers see to that.

A word of global memory orders as its atomic operations ask for. Small blocks of shared memory may be flags, too: a
store releases, and a load acquires, what is known, word by word.

Programs with partitions are always looked at, and what is wrong is an error; others if the sanitizer is to know.
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
"""So many elements may be a flag that partitions poll; a larger block is data."""

WORD = 4
"""Bytes, of what may be a flag."""

Clock = dict[Hashable, int]
"""How much is known of each: of a partition, how often it has released something; of an mbarrier, its finished
phases; of `Groups` of operations, how many are over.

Of `Fenced(partition)`, how much of that has a fence after it.
"""


class Task(Hashable, Protocol):
    """What is known here of an `iris.simulator.tasks.Task`: which partition of its program it is."""

    partition: int | None


class Fenced(NamedTuple):
    partition: Hashable


class Access(NamedTuple):
    """``who``: the partition, or what signals the access's end: the address of an mbarrier, or the operation's groups.

    ``when``: by their clock. ``place``: the recorder's number of one, if there is a recorder.
    """

    who: Hashable
    when: int
    partition: int | None
    verb: str
    place: Any


@dataclass(eq=False)
class _Barrier:
    """What those knew who have arrived, and who arrived in finished phases; how many phases are finished."""

    arrived: Clock = field(default_factory=dict)
    finished: Clock = field(default_factory=dict)
    phases: int = 0


class _Marks:
    """Of one allocation: for each byte, the number of the access that wrote it, and of each reader's last."""

    def __init__(self, memory: np.ndarray) -> None:
        self.memory = weakref.ref(memory)
        self._first, self._bytes = memory.ctypes.data, memory.nbytes
        self.written = self._none()
        self.read: defaultdict[Hashable, np.ndarray] = defaultdict(self._none)

    def _none(self) -> np.ndarray:
        return np.zeros(self._bytes, dtype=np.int32)

    def of(self, marks: np.ndarray, view: np.ndarray) -> np.ndarray:
        """Those of the bytes of ``view``, in place."""
        shape, size = (*view.shape, view.itemsize), marks.itemsize
        strides = (*(size * stride for stride in view.strides), size)
        return np.ndarray(shape, marks.dtype, marks, size * (view.ctypes.data - self._first), strides)


class Partitions:
    """Of one program: from `warp_specialize` until all its partitions are done, or from its first access on."""

    def __init__(self) -> None:
        self._clocks: defaultdict[Task, Clock] = defaultdict(dict)
        self._barriers: defaultdict[int, _Barrier] = defaultdict(_Barrier)
        # By word: what those knew who have released it.
        self._flags: defaultdict[int, Clock] = defaultdict(dict)
        # What was known at the last fence, which a relaxed write releases; and what relaxed reads have seen since.
        self._fenced: defaultdict[Task, Clock] = defaultdict(dict)
        self._seen: defaultdict[Task, Clock] = defaultdict(dict)
        self._marks: dict[int, _Marks] = {}
        nobody = Access(None, 0, None, "", "")
        self._accesses, self._numbers = [nobody], {nobody: 0}

    # What orders accesses -------------------------------------------------------------------------------------------

    def fork(self, parent: Task, children: Sequence[Task]) -> None:
        """``children`` begin, with what ``parent`` knows; what it has written needs no other fence for them."""
        self.fences(parent)
        for child in children:
            self._clocks[child] = dict(self._clocks[parent])
        self._clocks[parent][parent] += 1

    def join(self, parent: Task, children: Sequence[Task]) -> None:
        for child in children:
            _join(self._clocks[parent], self._clocks.pop(child, {}))

    def arrives(self, task: Task, mbarrier: np.ndarray) -> None:
        self._release_into(task, self._barriers[mbarrier.ctypes.data].arrived)

    def phase_ends(self, mbarrier: np.ndarray) -> None:
        barrier = self._barriers[mbarrier.ctypes.data]
        barrier.finished = dict(barrier.arrived)
        barrier.phases += 1

    def waited(self, task: Task, mbarrier: np.ndarray) -> None:
        address = mbarrier.ctypes.data
        barrier, clock = self._barriers[address], self._clocks[task]
        _join(clock, barrier.finished)
        clock[address] = barrier.phases

    def awaited(self, task: Task, groups: Groups) -> None:
        """``task`` has waited for operations that it has issued, as many as ``groups`` says."""
        self._clocks[task][groups] = groups.over

    def arrive(self, groups: Groups, issued: int, mbarrier: np.ndarray) -> None:
        """So many of the operations are over, and signal the mbarrier."""
        _join(self._barriers[mbarrier.ctypes.data].arrived, {groups: issued})

    def releases(self, task: Task, words: np.ndarray, asked: bool) -> None:
        """``task`` has written flags. ``asked``: as a release; else it releases what it knew at its last fence."""
        for word in _words(words):
            if asked:
                _join(self._flags[word], self._clocks[task])
            elif self._fenced[task]:
                _join(self._flags[word], self._fenced[task])
        if asked:
            self._advance(task)

    def acquires(self, task: Task, words: np.ndarray, asked: bool) -> None:
        """``task`` has read flags. ``asked``: as an acquire; else its next fence is one."""
        for word in _words(words):
            if word in self._flags:
                _join(self._clocks[task] if asked else self._seen[task], self._flags[word])

    def orders(self, task: Task) -> None:
        """``task`` orders its accesses of global memory: before those after it, and of flags."""
        _join(self._clocks[task], self._seen.pop(task, {}))
        self._clocks[task].setdefault(task, 1)
        self._fenced[task] = dict(self._clocks[task])
        self._advance(task)

    def fences(self, task: Task) -> None:
        clock = self._clocks[task]
        clock.setdefault(task, 1)
        clock |= {Fenced(who): when for who, when in clock.items() if isinstance(who, type(task))}
        clock[task] += 1  # what it writes from now on has no fence after it

    def _release_into(self, task: Task, released: Clock) -> None:
        self._clocks[task].setdefault(task, 1)
        _join(released, self._clocks[task])
        self._advance(task)

    def _advance(self, task: Task) -> None:
        clock = self._clocks[task]
        clock[task] = clock.get(task, 1) + 1

    # What is accessed -----------------------------------------------------------------------------------------------

    def reads(self, task: Task, view: np.ndarray, verb: str = "reads", groups: Groups | None = None) -> None:
        """``groups``: what signals that it is over, of what the GPU reads beside the program, after a fence."""
        marks, access = self._of(view), self._by(task, verb)
        self._check(task, marks.of(marks.written, view), access, fenced=groups is not None)
        if groups is not None:
            access = access._replace(who=groups, when=groups.number)
        marks.of(marks.read[access.who], view)[...] = self._note(access)

    def writes(
        self, task: Task, view: np.ndarray, verb: str = "writes", completion: np.ndarray | Groups | None = None
    ) -> None:
        """``completion``: the mbarrier, or groups, that signals its end, of what the GPU writes beside the program."""
        marks, access = self._of(view), self._by(task, verb)
        written = marks.of(marks.written, view)
        self._check(task, written, access)
        for reader, read in marks.read.items():
            if reader is not task:
                self._check(task, marks.of(read, view), access)
        if isinstance(completion, np.ndarray):
            address = completion.ctypes.data
            access = access._replace(who=address, when=self._barriers[address].phases + 1)
        elif completion is not None:
            access = access._replace(who=completion, when=completion.number)
        written[...] = self._note(access)

    def _by(self, task: Task, verb: str) -> Access:
        place = _place() if observer.recorder is None else observer.recorder.place()
        return Access(task, self._clocks[task].setdefault(task, 1), task.partition, verb, place)

    def _note(self, access: Access) -> int:
        number = self._numbers.setdefault(access, len(self._accesses))
        if number == len(self._accesses):
            self._accesses.append(access)
        return number

    def _of(self, view: np.ndarray) -> _Marks:
        memory = view if view.base is None else view.base
        marks = self._marks.get(memory.ctypes.data)
        if marks is None or marks.memory() is not memory:
            marks = self._marks[memory.ctypes.data] = _Marks(memory)
        return marks

    def _check(self, task: Task, marks: np.ndarray, access: Access, fenced: bool = False) -> None:
        clock, first = self._clocks[task], marks.flat[0]
        for number in (first,) if (marks == first).all() else np.unique(marks):
            earlier = self._accesses[number]
            if earlier.when > clock.get(earlier.who, 0):
                if isinstance(earlier.who, type(task)):
                    missing = "an mbarrier is not waited for, or lacks an arrival"
                else:
                    missing = "nobody has waited for the end of the first"
                self._wrong("race", earlier, access, missing)
            elif fenced and earlier.verb == "writes" and earlier.who is not task and self._lacks_fence(clock, earlier):
                missing = "no fence_async_shared stands between the two"
                self._wrong("race/missing-proxy-fence", earlier, access, missing)

    @staticmethod
    def _lacks_fence(clock: Clock, access: Access) -> bool:
        return access.when > clock.get(Fenced(access.who), 0)

    @staticmethod
    def _wrong(kind: str, earlier: Access, access: Access, missing: str) -> None:
        """The sanitizer reports it, and the program goes on; else it ends here."""
        if observer.recorder is not None:
            first, second = ((each.partition, each.verb, each.place) for each in (earlier, access))
            observer.recorder.shared_race(kind, first, second, missing)
            return
        raise SharedMemoryRaceError(
            f"a race in shared memory: partition {access.partition} {access.verb} at {access.place} what "
            f"partition {earlier.partition} {earlier.verb} at {earlier.place}, and nothing orders the two: {missing}"
        )


def _join(clock: Clock, other: Clock) -> None:
    for who, when in other.items():
        if clock.get(who, 0) < when:
            clock[who] = when


def _words(addresses: np.ndarray) -> list[int]:
    return np.unique(np.ravel(addresses).astype(np.int64) // WORD).tolist()


def _place() -> str:
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_BELOW_KERNELS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
