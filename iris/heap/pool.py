"""Memory that peers can reach, handed out in the order of streams, as by torch's caching allocator.

Contract
--------
*Taking and giving back are local*: peers learn from each call where a tensor lies (`iris.ccl.queue`), so it may lie
elsewhere on each rank, and a rank whose garbage collector runs later than another's changes nothing for that one.

*Memory belongs to the stream on which it was taken.* When the last tensor over it dies, the next request on that stream
may get it at once: what uses it then is behind what used it before. Peers keep to that order too, since they store to a
tensor, or load from it, only within a call that this rank has enqueued, between the call's beginning and its end. Other
streams get the memory when nothing else is left, and then wait for its stream. Work on a further stream holds memory
back only if `record_stream` is told, and otherwise has to be over, or waited for, when the tensor dies.

*A program that repeats itself soon has enough.* Where no memory of a size is left, all streams give back what they do
not use, and whoever uses any of that next waits for all of them: FSDP2 would gather no layer's parameters while it
computes with those before. So there is to be room for the most tensors of each size on each stream, up to twice what
all tensors together have had at once (`Pool.lacking`).

*Memory that is used in the capture of a CUDA graph and dies there is never given out again*: a graph may be replayed at
any time.
"""

import threading
import weakref
from collections import Counter, defaultdict, deque
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from iris import observer
from iris.compat.cuda import current_raw_stream, is_current_stream_capturing
from iris.cuda_graphs.capture import relaxed
from iris.heap.allocator import Allocator, round_up
from iris.heap.history import tensor_text
from iris.heap.lifetime import Life
from iris.heap.mapping import Mapping


@dataclass
class _Block:
    """Bytes that one tensor has, or had; ``region`` is None where they are torch's.

    ``stream``: its handle. ``count``, ``dtype``: of that tensor. ``others``: the further streams on which it is used.
    ``behind``: events of theirs, when it has died.
    """

    region: "_Region | None"
    offset: int
    room: int
    stream: Any
    count: int = 0
    dtype: torch.dtype = torch.uint8
    others: list[Any] = field(default_factory=list)
    behind: list[Any] = field(default_factory=list)


class _Region:
    """One mapping, of which tensors have parts."""

    def __init__(self, mapping: Mapping) -> None:
        self.mapping, self.allocator = mapping, Allocator(mapping.size)
        self.blocks: dict[int, _Block] = {}
        mapping.owner = weakref.ref(self)

    def name_at(self, offset: int) -> tuple[str, str]:
        """Which tensor is there, or was, and what of it, in words."""
        for block in list(self.blocks.values()):
            if 0 <= offset - block.offset < block.room:
                text = tensor_text((block.count,), block.dtype)
                return f"{text} of a process group's memory", f"byte {offset - block.offset}"
        return f"a process group's memory at offset {offset:#x}", "where no tensor is"

    def describe_offset(self, offset: int) -> str:
        """The same for messages about faults."""
        return ", ".join(self.name_at(offset))

    def progress(self) -> list[str]:
        """What it holds, in words. Local; any thread."""
        held = self.allocator.stats()
        return [f"memory for tensors of a process group: {held.reserved} of {self.mapping.size} bytes taken"]


class HandedOut(Life):
    """That of a tensor of a pool, wherever its memory is."""

    __slots__ = ()


def is_handed_out(tensor: torch.Tensor) -> bool:
    """Whether a pool made the tensor, or what it is a view of."""
    return isinstance(getattr(tensor.untyped_storage(), "iris_owner", None), HandedOut)


class Pool:
    """The memory of one rank for the tensors of a group; from torch where there is none.

    Attributes
    ----------
    size : int
        Bytes of all regions.
    """

    def __init__(self, device: torch.device) -> None:
        self.size = 0
        self._device = device
        self._regions: list[_Region] = []
        self._lock = threading.Lock()
        self._count = 0
        self._blocks: dict[int, _Block] = {}
        self._deaths: deque[tuple[int, bool]] = deque()
        self._capturing = is_current_stream_capturing if device.type == "cuda" else bool
        # By their handles, by which blocks know them: to make a Stream object costs the host ten times as much.
        self._streams: dict[Any, Any] = {}
        # Those that have died, by the stream that may have them next, and their room.
        self._idle: dict[tuple[Any, int], list[_Block]] = defaultdict(list)
        # What streams wait for before they use memory that others gave up.
        self._behind: list[Any] = []
        # By stream and room: bytes in use, and the most there have been. Then both of all together.
        self._used: Counter[tuple[Any, int]] = Counter()
        self._most: Counter[tuple[Any, int]] = Counter()
        self._at_once = self._most_at_once = 0
        # The largest request that found no room since the last region was added, or only what streams gave back for it.
        self._refused = 0

    def add(self, mapping: Mapping) -> None:
        """Hand out this memory too. Local."""
        with self._lock:
            self._regions.append(_Region(mapping))
            self.size += mapping.size
            self._refused = 0

    def lacking(self, count: int, dtype: torch.dtype) -> int:
        """How many bytes more, in one piece, it takes for calls like those so far, and the next one of ``count``."""
        with self._lock:
            self._bury()
            room = _room(count * dtype.itemsize)
            key = self._current(), room
            most = self._most.total() + max(0, self._used[key] + room - self._most[key])
            # Sizes that never come again would go on for ever.
            most = min(most, 2 * max(self._most_at_once, self._at_once + room))
            # Where there is enough for all and none for one, memory lies in pieces that are too small.
            return max(most - self.size, self._refused, 0)

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of ``[count]``, undefined. Local. In a capture the memory is torch's, which belongs to the graph."""
        if self._capturing():
            return self._from_torch(count, dtype, HandedOut(0, deque(), self._capturing))
        size = count * dtype.itemsize
        with self._lock:
            self._bury()
            stream, room = self._current(), _room(size)
            block = self._find(room, stream) or _Block(None, 0, room, stream)
            block.count, block.dtype = count, dtype
            self._count += 1
            number = self._count
            self._blocks[number] = block
            key = stream, room
            self._used[key] += room
            self._most[key] = max(self._most[key], self._used[key])
            self._at_once += room
            self._most_at_once = max(self._most_at_once, self._at_once)
            region = block.region
            if region is None:
                self._refused = max(self._refused, room)
            else:
                region.blocks[block.offset] = block
        life = HandedOut(number, self._deaths, self._capturing)
        if region is None:
            return self._from_torch(count, dtype, life)
        mapping = region.mapping
        storage = mapping.storage(mapping.rank, block.offset, size, life)
        if observer.recorder is not None:
            # Undefined it is. But FSDP2 gives it to an operator that writes it and whose schema says that it reads it.
            begin, text = mapping.bases[mapping.rank] + block.offset, tensor_text((count,), dtype)
            observer.recorder.allocated(begin, size, text, undefined=False)
        return torch.empty(0, dtype=dtype, device=self._device).set_(storage, 0, (count,))  # type: ignore[call-overload]

    def _from_torch(self, count: int, dtype: torch.dtype, life: Life) -> torch.Tensor:
        tensor = torch.empty(count, dtype=dtype, device=self._device)
        tensor.untyped_storage().iris_owner = life  # type: ignore[attr-defined]
        return tensor

    def place_of(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """The number of the region in which the tensor begins, and where; None if it is in none."""
        address = tensor.data_ptr()
        for number, region in enumerate(self._regions):
            offset = address - region.mapping.bases[region.mapping.rank]
            if is_handed_out(tensor) and 0 <= offset < region.mapping.size:
                return number, offset
        return None

    def peer(self, tensor: torch.Tensor, rank: int, region: int, offset: int) -> torch.Tensor:
        """A tensor like ``tensor``, which is contiguous, at that place of the rank's memory; it owns nothing there."""
        storage = self._regions[region].mapping.storage(rank, offset, tensor.nbytes)
        return torch.empty(0, dtype=tensor.dtype, device=self._device).set_(storage, 0, tensor.shape)  # type: ignore[call-overload]

    def record_stream(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Let the work on ``stream`` so far, and until the tensor dies, hold back its memory, if that is of this pool.

        torch's own ``record_stream`` knows nothing of such memory.
        """
        life = getattr(tensor.untyped_storage(), "iris_owner", None)
        if not isinstance(life, Life) or life.deaths is not self._deaths:
            return
        with self._lock:
            block = self._blocks[life.number]
            if block.region is not None and stream.cuda_stream != block.stream and stream not in block.others:
                block.others.append(stream)

    def _current(self) -> Any:
        """The handle of the current stream; None on the CPU."""
        if self._device.type != "cuda":
            return None
        handle = current_raw_stream(self._device.index)
        if handle not in self._streams:
            self._streams[handle] = torch.cuda.current_stream(self._device)
        return handle

    def _bury(self) -> None:
        """Take back what has died."""
        while self._deaths:
            number, captured = self._deaths.popleft()
            block = self._blocks.pop(number)
            self._used[block.stream, block.room] -= block.room
            self._at_once -= block.room
            if block.region is not None and not captured:
                block.behind = [stream.record_event() for stream in block.others]
                block.others = []
                self._idle[block.stream, block.room].append(block)

    def _find(self, room: int, stream: Any) -> _Block | None:
        idle = self._idle.get((stream, room))
        if idle:
            block = idle.pop()
            self._wait(stream, block.behind)
            block.behind = []
            return block
        found = self._cut(room, stream)
        if found is None and any(self._idle.values()):
            # As in `lacking`, more memory is for sizes that come again.
            if self.size < 2 * self._most_at_once:
                self._refused = max(self._refused, room)
            self._gather()
            found = self._cut(room, stream)
        return found

    def _cut(self, room: int, stream: Any) -> _Block | None:
        """Memory that no stream has."""
        for region in self._regions:
            offset = region.allocator.allocate(room)
            if offset is not None:
                # Another thread may capture a graph, which a question about an event would end.
                asks = self._behind and self._device.type == "cuda"
                with relaxed() if asks else nullcontext():
                    self._behind = [event for event in self._behind if not event.query()]
                self._wait(stream, self._behind)
                return _Block(region, offset, room, stream)
        return None

    def _wait(self, stream: Any, events: list[Any]) -> None:
        for event in events:
            self._streams[stream].wait_event(event)

    def _gather(self) -> None:
        """Take from all streams what has died, so that neighbours join."""
        blocks = [block for idle in self._idle.values() for block in idle]
        self._idle.clear()
        for stream in {block.stream for block in blocks} - {None}:
            self._behind.append(self._streams[stream].record_event())
        for block in blocks:
            assert block.region is not None
            self._behind += block.behind
            block.region.allocator.free(block.offset)
            block.region.blocks.pop(block.offset, None)


def _room(size: int) -> int:
    """Bytes that a tensor of ``size`` takes, with a gap behind it while somebody looks for accesses past its end."""
    return round_up(max(1, size if observer.recorder is None else size + observer.GAP))
