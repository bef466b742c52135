"""What a GPU does beside the program: copies and products that are issued now and awaited later.

They may run at any moment between the two, so a program that is right must not notice when. Here nothing happens before
something waits for it, and

* what an operation has yet to write in shared memory or registers is poison (NaN where the type has one),
* an element of its source that changes between issue and completion counts as poison, and so does one of its
  destination that something else writes.

So a wait that is missing, or comes too late, shows as wrong numbers instead of a race that is lost now and then.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import triton.language as tl

from iris.simulator import dtypes

Operation = Callable[[], None]


def _once(operation: Operation) -> Operation:
    left = [operation]

    def complete() -> None:
        while left:
            left.pop()()

    return complete


class Groups:
    """Operations of one kind, in the order of issue: committed in groups, awaited by how many groups may be left.

    ``number``: that of the group that is open, from 1 on; ``over``: so many groups have been waited for.
    """

    def __init__(self) -> None:
        self.number, self.over = 1, 0
        self._open: list[Operation] = []
        self._committed: deque[list[Operation]] = deque()

    def issue(self, operation: Operation) -> None:
        self._open.append(_once(operation))

    def commit(self) -> None:
        self._committed.append(self._open)
        self._open = []
        self.number += 1

    def issued(self) -> list[Operation]:
        """All that are not known to be complete, in their order."""
        return [operation for group in (*self._committed, self._open) for operation in group]

    def wait(self, outstanding: int) -> None:
        """Complete all groups but the latest ``outstanding``."""
        while len(self._committed) > outstanding:
            for operation in self._committed.popleft():
                operation()
            self.over += 1


@dataclass(eq=False)
class InFlight:
    """What a task has issued and nothing has waited for."""

    copies: Groups = field(default_factory=Groups)
    """From global to shared memory: cp.async on NVIDIA, loads to LDS on AMD."""
    products: Groups = field(default_factory=Groups)
    """Of a warp group: wgmma."""
    stores: Groups = field(default_factory=Groups)
    """TMA's, from shared to global memory, that have not read their source."""
    writes: list[Operation] = field(default_factory=list)
    """The second half of TMA's stores: the source is read, the destination not written."""
    announced: defaultdict[int, deque[Operation]] = field(default_factory=lambda: defaultdict(deque))
    """Operations whose end an mbarrier signals, by its address. A program and its partitions share them."""

    def write(self) -> None:
        writes, self.writes = self.writes, []
        for operation in writes:
            operation()


class Destination:
    """The elements ``written`` of memory, which an operation writes at some time between now and its completion."""

    def __init__(self, memory: np.ndarray, element: tl.dtype, written: bool | np.ndarray = True) -> None:
        self._memory, self._written = memory, written
        self._poison = dtypes.poison(element)
        np.copyto(memory, self._poison, where=written)

    def complete(self, values: np.ndarray) -> None:
        bits = f"u{self._memory.itemsize}"
        untouched = self._memory.view(bits) == self._poison.view(bits)
        np.copyto(self._memory, np.where(untouched, values, self._poison), where=self._written)


class Source:
    """What an operation reads at some time between now and its completion."""

    def __init__(self, read: Callable[[], np.ndarray], element: tl.dtype) -> None:
        self._read = read
        self._poison = dtypes.poison(element)
        self._at_issue = read()

    def at_completion(self) -> np.ndarray:
        now = self._read()
        return np.where(now == self._at_issue, now, self._poison)
