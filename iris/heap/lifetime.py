"""When a tensor's memory is no longer in use on this rank.

A garbage collector runs when it likes, perhaps in the middle of an allocation, so the death of a tensor does nothing
but append its number to a queue. Later, where the ranks meet, the queue is read. Kernels may still be using the memory
then: a block is *ready* once the work that was on the streams when its death was read has finished, which is asked and
never waited for, since that work may itself be waiting for a peer.

While one of the streams is being captured into a CUDA graph, blocks that have died wait for the end of the capture: no
event says what had been on the stream before (`iris.cuda_graphs.capture.record_event`).

Memory that a CUDA graph may use is never ready: a graph can be replayed at any time.
"""

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from iris.compat.cuda import current_raw_stream
from iris.cuda_graphs.capture import record_event, relaxed


def _never() -> bool:
    return False


class Life:
    """Held by the storage of a tensor, so that its end is the death of the last tensor over that storage.

    ``deaths`` then gets the ``number``, and whether the current stream of that thread was capturing a CUDA graph.
    """

    __slots__ = ("number", "freed", "deaths", "_capturing")

    def __init__(self, number: int, deaths: deque[tuple[int, bool]], capturing: Callable[[], bool]) -> None:
        self.number = number
        self.freed = False
        self.deaths = deaths
        self._capturing = capturing

    def end(self) -> None:
        """Report the death, once."""
        if not self.freed:
            self.freed = True
            self.deaths.append((self.number, self._capturing()))

    # May run in any thread, between any two instructions: appending to a deque is all that is safe.
    __del__ = end


class Lifetimes:
    """The lives of one heap's tensors, on a device with streams or without.

    Attributes
    ----------
    pinned : set of int
        Numbers of blocks that a CUDA graph may use.
    """

    def __init__(self, device: torch.device) -> None:
        self.pinned: set[int] = set()
        self._device = device
        self._has_streams = device.type != "cpu"
        self._deaths: deque[tuple[int, bool]] = deque()
        # Numbers of dead blocks: those for which no event has been recorded yet, and the others with their events.
        self._read: list[int] = []
        self._unfinished: list[tuple[list[Any], list[int]]] = []
        self._streams: dict[int, torch.cuda.Stream] = {}
        self.capturing = _never
        if self._has_streams:
            self.capturing = torch.cuda.is_current_stream_capturing
            self.record_stream(torch.cuda.default_stream(device))

    def begin(self, number: int) -> Life:
        """The life of block ``number``, used on the current stream from now on."""
        if self._has_streams:
            self.see_current_stream()
            if self.capturing():
                self.pinned.add(number)
        return Life(number, self._deaths, self.capturing)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Let work on ``stream`` hold back memory from now on."""
        self._streams[stream.cuda_stream] = stream

    def see_current_stream(self) -> None:
        """`record_stream` of the current stream, cheaply."""
        if self._has_streams and current_raw_stream(self._device.index) not in self._streams:
            self.record_stream(torch.cuda.current_stream(self._device))

    def collect(self) -> list[int]:
        """The numbers of blocks that became ready since the last call. Does not wait for anything."""
        self.see_current_stream()
        while self._deaths:
            number, captured = self._deaths.popleft()
            if captured or number in self.pinned:
                self.pinned.add(number)
            else:
                self._read.append(number)
        # Another thread may be capturing a stream that is none of these, and a query would make that invalid too.
        with relaxed() if self._device.type == "cuda" else nullcontext():
            events: list[Any] = []
            if self._read and all(record_event(stream, events) for stream in self._streams.values()):
                self._unfinished.append((events, self._read))
                self._read = []
            ready, unfinished = [], []
            for events, numbers in self._unfinished:
                events = [event for event in events if not event.query()]
                if events:
                    unfinished.append((events, numbers))
                else:
                    ready += numbers
        self._unfinished = unfinished
        return ready

    def dead(self) -> set[int]:
        """The numbers of blocks whose tensors have died here, and which `collect` has not taken yet.

        Those that a graph may use, `collect` never returns.
        """
        unread = {number for number, _ in list(self._deaths)}
        return unread.union(self._read, *(numbers for _, numbers in self._unfinished))

    @property
    def num_dead(self) -> int:
        """How many blocks `dead` names."""
        return len(self._deaths) + self.waiting()

    def waiting(self) -> int:
        """How many dead blocks wait for work on a stream to finish, or for the end of a capture."""
        return len(self._read) + sum(len(numbers) for _, numbers in self._unfinished)
