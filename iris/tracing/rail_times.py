"""Notes when transfers between hosts began and ended: the timer of `iris.world.rail` for traces.

A transfer begins when its rank has come to it, and ends when the data that it receives are there. So it includes the
time for which a rank waits for another host, and no transfer ends before all those have begun whose data it receives.

In the simulator the host reads the clock that kernels read there (`HostTimes`). On a GPU two kernels read it
(`StreamTimes`): one on the stream of the call, before the transfer, and one on a stream of the rail's own, which waits
for the transfer and for nothing else. So the times are on the clock of all other events, and a CUDA graph notes them at
each replay.

On a GPU a row of the table has two times and a number. The host knows which `Transfer` a number stands for. A program
may be traced for days, so it forgets numbers to which no row can refer any more:

1. No number is used for a second transfer, so a kernel that is still enqueued writes a number that means the same.
   Equal transfers share a number as long as it is kept.
2. A graph writes the numbers that it was captured with at each replay. They are kept as long as any graph of the
   process lives (`StreamTimes.forget`), since torch does not say which graph it is.
3. Outside graphs only the first `ROOM` transfers that begin after a `forget` have a row. The host may be ahead of the
   GPU by `UNDER_WAY` transfers. So the numbers of the first ``ROOM + UNDER_WAY`` that are enqueued after a `forget` are
   kept, and of the last `UNDER_WAY` before it, which may be on streams that the `forget` did not wait for.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from iris.compat.cuda import is_current_stream_capturing
from iris.cuda_graphs.capture import a_graph_lives
from iris.cuda_graphs.kept import keep
from iris.heap.mapping import snapshot
from iris.language.clock import clock
from iris.world.rail import Transfer

ROOM = 1 << 16
"""The number of rows: how many transfers are noted."""

# A row, int64: when it began and ended, in ns of the rank's clock (0: it has not), and the number of its `Transfer`.
WORDS = 3
BEGAN, ENDED, NUMBER = map(tl.constexpr, range(WORDS))

# How many transfers the host may have enqueued that have not ended. Each has a word, in which the kernel at its begin
# leaves the index of its row for the kernel at its end. A word is alone in 16 bytes, so that all words are aligned
# alike: kernels are compiled for the alignment of their pointers.
UNDER_WAY = 4096

# The number of a transfer that gets no row.
NO_NUMBER = -1


class RailTimes(ABC):
    """The times of the transfers of a rank's rails: an `iris.world.rail.Timer`."""

    def __init__(self) -> None:
        # Two threads may use a link, one that sends and one that receives (`iris.world.links`).
        self._lock = threading.Lock()

    @abstractmethod
    def timed(self, transfer: Transfer, start: Callable[[], Any]) -> tuple[Callable[[], Any], Callable[[], None]]:
        """See `iris.world.rail.Timer`."""

    @abstractmethod
    def forget(self, idle: bool = False) -> None:
        """Forget all times; on a GPU enqueued on the current stream. ``idle``: nothing of this rank is running."""

    @abstractmethod
    def recorded(self) -> tuple[np.ndarray, tuple[Transfer, ...], int]:
        """The rows, int64 ``[transfers, WORDS]``; what their numbers stand for; and how many transfers had no room.

        Does not wait for the GPU.
        """


class HostTimes(RailTimes):
    """The times by the host's clock, for rails for which the host waits (Gloo)."""

    def __init__(self) -> None:
        super().__init__()
        # [begin, end] of each transfer, and what it was.
        self._rows: list[tuple[list[int], Transfer]] = []
        self._lost = 0

    def timed(self, transfer: Transfer, start: Callable[[], Any]) -> tuple[Callable[[], Any], Callable[[], None]]:
        times = [time.monotonic_ns(), 0]
        with self._lock:
            if len(self._rows) < ROOM:
                self._rows.append((times, transfer))
            else:
                self._lost += 1

        def note(_: Any = None) -> None:
            times[1] = times[1] or time.monotonic_ns()

        def start_timed() -> Any:
            work = start()
            # Gloo's own thread comes here when the data are there, while this one may be computing.
            work.get_future().add_done_callback(note)
            return work

        return start_timed, note

    def forget(self, idle: bool = False) -> None:
        with self._lock:
            self._rows, self._lost = [], 0

    def recorded(self) -> tuple[np.ndarray, tuple[Transfer, ...], int]:
        with self._lock:
            noted, lost = list(self._rows), self._lost
        numbers: dict[Transfer, int] = {}
        rows = [(*times, numbers.setdefault(transfer, len(numbers))) for times, transfer in noted]
        return np.array(rows, dtype=np.int64).reshape(-1, WORDS), tuple(numbers), lost


# `do_not_specialize`: one binary for all numbers. Without it the number 1, for example, would have one of its own.
@triton.jit(do_not_specialize=["number"])
def note_beginning(taken, rows, place, number, ROOM: tl.constexpr, WORDS: tl.constexpr):
    """Take the next row of ``rows`` (int64 ``[ROOM, WORDS]``), leave its number in ``place``, and write the time."""
    row = tl.atomic_add(taken, tl.full((), 1, tl.int64), sem="relaxed", scope="gpu")
    tl.store(place, row)
    here = rows + row * WORDS
    tl.store(here + NUMBER, number, mask=row < ROOM)
    tl.store(here + ENDED, 0, mask=row < ROOM)
    tl.store(here + BEGAN, clock(), mask=row < ROOM)


@triton.jit
def note_end(rows, place, ROOM: tl.constexpr, WORDS: tl.constexpr):
    """Write the time into the row whose number `note_beginning` has left in ``place``."""
    row = tl.load(place)
    tl.store(rows + row * WORDS + ENDED, clock(), mask=row < ROOM)


class StreamTimes(RailTimes):
    """The times by the GPU's clock, for rails whose transfers are enqueued (NCCL). Construction blocks the host."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._taken = keep(lambda: torch.zeros(1, dtype=torch.int64, device=device), device)
        self._rows = keep(lambda: torch.zeros(ROOM, WORDS, dtype=torch.int64, device=device), device)
        self._places = keep(lambda: torch.zeros(UNDER_WAY, 2, dtype=torch.int64, device=device), device)
        # How many transfers were enqueued outside graphs; and how many of these before the last `forget`.
        self._enqueued = self._forgotten = 0
        # The transfer of each number, the number of each transfer, the next number, and the value of `_enqueued` when
        # each was last enqueued. `_in_graphs` has the numbers that graphs use.
        self._described: dict[int, Transfer] = {}
        self._numbers: dict[Transfer, int] = {}
        self._next = 0
        self._last_use: dict[int, int] = {}
        self._wait_streams: dict[str, torch.cuda.Stream] = {}
        # Launch both kernels now, as they cannot be loaded during a capture.
        place = self._places[0]
        self._begin(place, 0)
        self._end(place)
        self.forget()
        torch.cuda.current_stream(device).synchronize()

    def timed(self, transfer: Transfer, start: Callable[[], Any]) -> tuple[Callable[[], Any], Callable[[], None]]:
        # `started` has an element once torch has returned a work, and so runs the transfer on a stream of its own.
        capturing, held, started = is_current_stream_capturing(), [start], list[bool]()
        with self._lock:
            number, place = self._in_graph(transfer) if capturing else self._enqueue(transfer)
        side = self._wait_stream(transfer.rail)
        self._begin(place, number)

        def start_timed() -> Any:
            work = start()
            if work is None:
                return work
            started.append(True)
            with torch.cuda.stream(side):
                work.wait()
                self._end(place)
            return work

        def join() -> None:
            if not started:
                # The transfer was on the current stream itself, or there was nothing to send.
                self._end(place)
            elif capturing:
                # All streams of a capture must join the one on which it began.
                torch.cuda.current_stream(self._device).wait_stream(side)
            # `start` holds the tensors until here: torch lets go of them at the first `wait` of a work, the one above.
            held.clear()

        return start_timed, join

    def forget(self, idle: bool = False) -> None:
        self._taken.zero_()
        if idle and _in_graphs and not a_graph_lives():
            # Those of other contexts, too: a process has one device, and nothing runs on it.
            _in_graphs.clear()
        with self._lock:
            self._forgotten = self._enqueued
            oldest = self._enqueued - (0 if idle else UNDER_WAY)
            self._last_use = {number: last for number, last in self._last_use.items() if last > oldest}
            kept = self._last_use.keys() | (_in_graphs[self].numbers if self in _in_graphs else ())
            self._described = {number: self._described[number] for number in sorted(kept)}
            self._numbers = {transfer: number for number, transfer in self._described.items()}

    def recorded(self) -> tuple[np.ndarray, tuple[Transfer, ...], int]:
        taken = int(snapshot(self._taken.view(torch.uint8)).view(np.int64)[0])
        rows = snapshot(self._rows[: min(taken, ROOM)].reshape(-1).view(torch.uint8)).view(np.int64).reshape(-1, WORDS)
        with self._lock:
            numbers = [number for number in np.unique(rows[:, NUMBER.value]).tolist() if number in self._described]
            described = tuple(self._described[number] for number in numbers)
        # A row that a kernel has taken and not written yet may hold any number.
        rows = rows[np.isin(rows[:, NUMBER.value], numbers)]
        rows[:, NUMBER.value] = np.searchsorted(numbers, rows[:, NUMBER.value])
        return rows, described, taken - len(rows)

    def _enqueue(self, transfer: Transfer) -> tuple[int, torch.Tensor]:
        """The number and the word for a transfer outside graphs. The caller holds the lock."""
        self._enqueued += 1
        place = self._places[self._enqueued % UNDER_WAY]
        if self._enqueued - self._forgotten > ROOM + UNDER_WAY:
            return NO_NUMBER, place
        number = self._number(transfer)
        self._last_use[number] = self._enqueued
        return number, place

    def _in_graph(self, transfer: Transfer) -> tuple[int, torch.Tensor]:
        """The number and the word for a captured transfer. It keeps its word, as its graph may run beside others."""
        graphs, number = _in_graphs.setdefault(self, _InGraphs()), self._number(transfer)
        graphs.numbers.add(number)
        if graphs.words % WORDS_AT_A_TIME == 0:
            graphs.places.append(keep(lambda: torch.zeros_like(self._places[:WORDS_AT_A_TIME]), self._device))
        graphs.words += 1
        return number, graphs.places[-1][(graphs.words - 1) % WORDS_AT_A_TIME]

    def _number(self, transfer: Transfer) -> int:
        if transfer not in self._numbers:
            self._numbers[transfer] = self._next
            self._described[self._next] = transfer
            self._next += 1
        return self._numbers[transfer]

    def _wait_stream(self, rail: str) -> torch.cuda.Stream:
        """The stream that waits for a rail's transfers. High priority, so that the kernel at the end starts at once."""
        if rail not in self._wait_streams:
            self._wait_streams[rail] = torch.cuda.Stream(self._device, priority=-1)
        return self._wait_streams[rail]

    def _begin(self, place: torch.Tensor, number: int) -> None:
        note_beginning[(1,)](self._taken, self._rows, place, number, ROOM, WORDS, num_warps=1)

    def _end(self, place: torch.Tensor) -> None:
        note_end[(1,)](self._rows, place, ROOM, WORDS, num_warps=1)


@dataclass
class _InGraphs:
    """The numbers that captured graphs use of one `StreamTimes`; and their words: how many, and in which tensors."""

    numbers: set[int] = field(default_factory=set)
    places: list[torch.Tensor] = field(default_factory=list)
    words: int = 0


WORDS_AT_A_TIME = 256

# A graph may be replayed after its context is gone, so what it uses is kept here.
_in_graphs: dict[StreamTimes, _InGraphs] = {}


def times_on(device: torch.device) -> RailTimes:
    """The `RailTimes` for the rails of a rank on this device."""
    return HostTimes() if device.type == "cpu" else StreamTimes(device)
