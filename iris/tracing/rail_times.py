"""When transfers between hosts began and ended, as `iris.world.rail` tells them: rows of their own in a trace.

A transfer begins when its rank has come to it, and ends when what it brings is there. So the time that a rank waits for
another host is part of it, and no transfer ends before all have begun whose data it brings.

In the simulator the host reads the clock that kernels read there. On a GPU two kernels do, so that the times are on
the clock of all other events, and a CUDA graph notes them each time it is replayed: one on the stream of the call in
front of the transfer, and one on a stream of the rail's own, which waits for the transfer and for nothing else.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from iris.compat.cuda import is_current_stream_capturing
from iris.cuda_graphs.kept import keep
from iris.heap.mapping import snapshot
from iris.language.clock import clock
from iris.world.rail import Transfer

ROOM = 1 << 16
"""Transfers for which there is room."""

# A row, int64: when it began and ended, in ns of the rank's clock (0: it has not), and the number of its `Transfer`.
WORDS = 3
BEGAN, ENDED, NUMBER = map(tl.constexpr, range(WORDS))

# Transfers that the host may have enqueued and that have not ended. Each has a word for the row that its beginning
# took, and 16 bytes for the word: kernels are compiled for how their pointers are aligned.
UNDER_WAY = 4096


class RailTimes(ABC):
    """What is known of the transfers of a rank's rails: an `iris.world.rail.Timer`.

    Attributes
    ----------
    transfers : list of Transfer
        Which there were, each once, by number.
    """

    def __init__(self) -> None:
        self.transfers: list[Transfer] = []
        self._numbers: dict[Transfer, int] = {}
        # Messages may be sent and received by two threads (`iris.world.links`).
        self._lock = threading.Lock()

    def _number(self, transfer: Transfer) -> int:
        with self._lock:
            if transfer not in self._numbers:
                self._numbers[transfer] = len(self.transfers)
                self.transfers.append(transfer)
            return self._numbers[transfer]

    @abstractmethod
    def timed(self, transfer: Transfer, start: Callable[[], Any]) -> tuple[Callable[[], Any], Callable[[], None]]:
        """As `iris.world.rail.Timer` says."""

    @abstractmethod
    def forget(self) -> None:
        """Forget what there was; on a GPU enqueued on the current stream."""

    @abstractmethod
    def rows(self) -> tuple[np.ndarray, int]:
        """int64 ``[transfers, WORDS]``, and how many had no room. Does not wait for the GPU."""


class HostTimes(RailTimes):
    """By the host's clock, for rails that it waits for."""

    def __init__(self) -> None:
        super().__init__()
        self._rows: list[list[int]] = []
        self._lost = 0

    def timed(self, transfer: Transfer, start: Callable[[], Any]) -> tuple[Callable[[], Any], Callable[[], None]]:
        row = [time.monotonic_ns(), 0, self._number(transfer)]
        with self._lock:
            if len(self._rows) < ROOM:
                self._rows.append(row)
            else:
                self._lost += 1

        def note(_: Any = None) -> None:
            row[1] = row[1] or time.monotonic_ns()

        def start_timed() -> Any:
            work = start()
            # Gloo's own thread comes here when the data are there, while this one may be computing.
            work.get_future().add_done_callback(note)
            return work

        return start_timed, note

    def forget(self) -> None:
        self._rows, self._lost = [], 0

    def rows(self) -> tuple[np.ndarray, int]:
        return np.array(self._rows, dtype=np.int64).reshape(-1, WORDS), self._lost


# Compiled once, whatever the number is: 1, say, would be a constant of its own.
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
    """By the GPU's clock, for rails that are enqueued. Construction blocks the host."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._taken = keep(lambda: torch.zeros(1, dtype=torch.int64, device=device), device)
        self._rows = keep(lambda: torch.zeros(ROOM, WORDS, dtype=torch.int64, device=device), device)
        self._places = keep(lambda: torch.zeros(UNDER_WAY, 2, dtype=torch.int64, device=device), device)
        self._count = 0
        self._sides: dict[str, torch.cuda.Stream] = {}
        # Both are loaded now: a capture must not do that.
        place = self._places[0]
        self._begin(place, 0)
        self._end(place)
        self.forget()
        torch.cuda.current_stream(device).synchronize()

    def timed(self, transfer: Transfer, start: Callable[[], Any]) -> tuple[Callable[[], Any], Callable[[], None]]:
        capturing, held, started = is_current_stream_capturing(), [start], list[bool]()
        place, side = self._place(capturing), self._side(transfer.rail)
        self._begin(place, self._number(transfer))

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
                # It was on the current stream itself, or there was nothing to send.
                self._end(place)
            elif capturing:
                # A capture ends on the stream on which it began.
                torch.cuda.current_stream(self._device).wait_stream(side)
            # Until here this holds the tensors: at the first `wait` of a work, the one above, torch lets go of them.
            held.clear()

        return start_timed, join

    def forget(self) -> None:
        self._taken.zero_()

    def rows(self) -> tuple[np.ndarray, int]:
        taken = int(snapshot(self._taken.view(torch.uint8)).view(np.int64)[0])
        rows = snapshot(self._rows[: min(taken, ROOM)].reshape(-1).view(torch.uint8)).view(np.int64)
        return rows.reshape(-1, WORDS), max(0, taken - ROOM)

    def _place(self, capturing: bool) -> torch.Tensor:
        """A word for a transfer. A graph keeps its own, as it will be replayed beside others."""
        if capturing:
            place = keep(lambda: torch.zeros(1, dtype=torch.int64, device=self._device), self._device)
            _in_graphs.append((self, place))
            return place
        with self._lock:
            self._count += 1
            return self._places[self._count % UNDER_WAY]

    def _side(self, rail: str) -> torch.cuda.Stream:
        """The stream that waits for a rail's transfers. It comes first where there is little room on the GPU."""
        if rail not in self._sides:
            self._sides[rail] = torch.cuda.Stream(self._device, priority=-1)
        return self._sides[rail]

    def _begin(self, place: torch.Tensor, number: int) -> None:
        note_beginning[(1,)](self._taken, self._rows, place, number, ROOM, WORDS, num_warps=1)

    def _end(self, place: torch.Tensor) -> None:
        note_end[(1,)](self._rows, place, ROOM, WORDS, num_warps=1)


# What graphs that were captured use. They may be replayed for as long as the process lives.
_in_graphs: list[tuple[StreamTimes, torch.Tensor]] = []


def times_on(device: torch.device) -> RailTimes:
    """For the rails of a rank on this device."""
    return HostTimes() if device.type == "cpu" else StreamTimes(device)
