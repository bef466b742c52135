"""The all-reduce of `iris.language.cluster`, by which the programs of a thread block cluster exchange numbers.

The numbers lie in no memory that anything else could reach, so nothing is reported to the sanitizer.
"""

from dataclasses import dataclass, field

import numpy as np
import triton.language as tl

from iris.compat.interpreter import TensorHandle
from iris.simulator import tasks


@dataclass
class Exchange:
    """The exchange of one cluster: two numbers of each program, and whether it has arrived."""

    programs: int
    numbers: np.ndarray = field(init=False)
    arrived: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.numbers = np.zeros((2, self.programs), dtype=np.float32)
        self.arrived = np.zeros(self.programs, dtype=np.int32)

    def arrive(self, rank: int, *numbers: float) -> None:
        if self.arrived[rank]:
            raise RuntimeError("a program meets its cluster twice in one launch")
        self.numbers[:, rank], self.arrived[rank] = numbers, 1

    def wait(self) -> None:
        where = np.array([self.arrived.ctypes.data], dtype=np.uint64)
        while not self.arrived.all():
            missing = ", ".join(map(str, np.flatnonzero(self.arrived == 0)))
            waits_for = f"programs {missing} of its cluster of {self.programs}"
            tasks.observe("cluster exchange", where, self.arrived.copy(), tl.int32, lambda: False, waits_for=waits_for)


def all_reduce(values: tl.tensor, peaks: tl.tensor, programs: int) -> tuple[tl.tensor, tl.tensor]:
    """The sum of all ``values`` and the largest of ``peaks``: the same bits in all programs."""
    task = tasks.current()
    (x, y, z), (columns, rows, _) = task.index, task.launch.dims
    number = (z * rows + y) * columns + x
    exchange = task.launch.cluster_exchanges.setdefault(number // programs, Exchange(programs))
    exchange.arrive(number % programs, np.add.reduce(values.handle.data), np.maximum.reduce(peaks.handle.data))
    exchange.wait()
    return tuple(
        tl.tensor(TensorHandle(operation.reduce(numbers)[None], tl.float32), tl.float32)
        for operation, numbers in zip((np.add, np.maximum), exchange.numbers, strict=True)
    )
