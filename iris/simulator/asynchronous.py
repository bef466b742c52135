"""Asynchronous operations: copies and products that a program issues now and waits for later.

A GPU may carry them out at any moment between the two, so a correct program must not notice when. Here an operation is
carried out as late as possible: when something waits for it. And the values are *poison* (NaN if the type has one)

* in its destination, until then,
* of elements of its source that have changed since the issue,
* of elements of its destination that something else has written since the issue.

So a wait that is missing, or comes too late, gives wrong numbers each time, and not just now and then.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import triton.language as tl

from iris.simulator import dtypes

Operation = Callable[[], None]


def _once(operation: Operation) -> Operation:
    """``operation``, but from its second call on it does nothing: a group and an mbarrier may both wait for it."""
    left = [operation]

    def complete() -> None:
        while left:
            left.pop()()

    return complete


class Groups:
    """Operations of one kind, in order of issue. They are committed in groups; a wait says how many groups may be left.

    Attributes
    ----------
    number : int
        The number of the group that is open, from 1 on.
    over : int
        How many groups have been waited for.
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
        """All operations for which nothing has waited, in their order."""
        return [operation for group in (*self._committed, self._open) for operation in group]

    def wait(self, outstanding: int) -> None:
        """Complete all groups but the latest ``outstanding``."""
        while len(self._committed) > outstanding:
            for operation in self._committed.popleft():
                operation()
            self.over += 1


@dataclass(eq=False)
class InFlight:
    """What a task has issued and has not waited for."""

    copies: Groups = field(default_factory=Groups)
    """From global to shared memory: cp.async on NVIDIA, loads to LDS on AMD."""
    products: Groups = field(default_factory=Groups)
    """Matrix products of a warp group: wgmma."""
    stores: Groups = field(default_factory=Groups)
    """Stores by TMA from shared to global memory that have not read their source."""
    writes: list[Operation] = field(default_factory=list)
    """The second half of such stores: they have read their source, but not written their destination."""
    announced: defaultdict[int, deque[Operation]] = field(default_factory=lambda: defaultdict(deque))
    """By an mbarrier's address, the operations that signal it at their end. The program's partitions share them."""

    def write(self) -> None:
        """Carry out what is left of stores by TMA."""
        writes, self.writes = self.writes, []
        for operation in writes:
            operation()


class Destination:
    """Memory of which an operation writes some elements, at some time between now and its completion.

    ``written``: which elements, a mask.
    """

    def __init__(self, memory: np.ndarray, element: tl.dtype, written: bool | np.ndarray = True) -> None:
        self._memory, self._written = memory, written
        self._poison = dtypes.poison(element)
        np.copyto(memory, self._poison, where=written)

    def complete(self, values: np.ndarray) -> None:
        """Write ``values``; poison to elements that something else has written meanwhile."""
        bits = f"u{self._memory.itemsize}"
        untouched = self._memory.view(bits) == self._poison.view(bits)
        np.copyto(self._memory, np.where(untouched, values, self._poison), where=self._written)


class Source:
    """What an operation reads, by ``read()``, at some time between now and its completion."""

    def __init__(self, read: Callable[[], np.ndarray], element: tl.dtype) -> None:
        self._read = read
        self._poison = dtypes.poison(element)
        self._at_issue = read()

    def at_completion(self) -> np.ndarray:
        """The values; poison for elements that have changed meanwhile."""
        now = self._read()
        return np.where(now == self._at_issue, now, self._poison)
