"""Memory that peers can reach, handed out in the order of streams, as by torch's caching allocator.

Contract
--------
*Taking and giving back are local*: peers learn from each call where a tensor lies (`iris.ccl.queue`), so it may lie
elsewhere on each rank, and a rank whose garbage collector runs later than another's changes nothing for that one.

*Memory belongs to the stream on which it was taken.* When the last tensor over it dies it is idle: the next request of
that size on that stream may get it at once, as its work comes after that of the tensor before. Peers keep to that order
too, since they store to a tensor, or load from it, only within a call that this rank has enqueued, between the call's
beginning and its end. Other streams get the memory only when no other is left, and then wait for its stream. Work on a
further stream holds memory back only if it was named to `record_stream`. Otherwise it has to be over, or the tensor's
stream has to have waited for it, when the tensor dies.

*A program that repeats itself soon has enough.* Where no memory of a size is left, all streams give back their free
memory, and whoever uses any of that next waits for all of these streams: FSDP2 would gather no layer's parameters while
it computes with those before. So there is to be room for the most tensors of each size on each stream, up to about
twice what all tensors together have had at once (`Pool.lacking`).

*Memory whose tensor dies in the capture of a CUDA graph*, that is in a thread whose current stream is being captured,
*is never given out again*: the graph may use it, and may be replayed at any time. Other tensors that a graph uses the
program keeps alive for as long as it replays the graph, as it does torch's.

*Memory that has to wait for a stream which is being captured stays where it is* until that capture is over, as with
torch's allocator: no event of such a stream is one that others can wait for.

*A stream lives as long as the pool* if memory was taken on it, or if it was given to `record_stream`. torch's own do;
of a `torch.cuda.ExternalStream` it is up to the program.
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
from iris.cuda_graphs.capture import record_event, relaxed
from iris.heap.allocator import Allocator, round_up
from iris.heap.history import tensor_text
from iris.heap.lifetime import Life
from iris.heap.mapping import Mapping


@dataclass
class _Block:
    """Bytes that one tensor has, or had until it died.

    ``region``: None where the memory is torch's. ``offset``, ``room``: in bytes. ``stream``: the handle of the stream
    that it belongs to, None on the CPU. ``count``, ``dtype``: of the tensor. ``others``: the streams that
    `Pool.record_stream` was given for it, without those on which an event has been recorded since the tensor died.
    ``events``: these events; the next user of the memory waits for them.
    """

    region: "_Region | None"
    offset: int
    room: int
    stream: Any
    count: int = 0
    dtype: torch.dtype = torch.uint8
    others: list[Any] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)


class _Region:
    """One mapping, and the blocks that were cut from it, by offset."""

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
    """The life of a tensor that a pool made, in its own memory or in torch's."""

    __slots__ = ()


def is_handed_out(tensor: torch.Tensor) -> bool:
    """Whether a pool made the tensor, or what it is a view of."""
    try:
        storage = tensor.untyped_storage()
    except NotImplementedError:  # of sparse tensors, and of those in transforms of torch.func
        return False
    return isinstance(getattr(storage, "iris_owner", None), HandedOut)


class Pool:
    """One rank's memory for tensors of a group. Where none is left, tensors are in torch's.

    A dead tensor's block goes from `_blocks` to `_idle`, and from there to the next tensor of its size and stream. When
    a request finds neither idle memory nor free memory of a region, all idle blocks are freed, so that neighbours join.
    Any thread may call; tensors may die in any.

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
        # Of tensors made outside of captures: how many, and the blocks of those not known to be dead, by number.
        self._count = 0
        self._blocks: dict[int, _Block] = {}
        # See `Life`: the number of each tensor that died, and whether that was during a capture.
        self._deaths: deque[tuple[int, bool]] = deque()
        # bool() is False: the CPU has no captures.
        self._capturing = is_current_stream_capturing if device.type == "cuda" else bool
        # By handle. Blocks have handles, since to make a Stream object costs the host ten times as much.
        self._streams: dict[Any, Any] = {}
        # Blocks of dead tensors: those that a stream which is being captured may still use, and then the others, by the
        # stream that they belong to and their room.
        self._dying: list[_Block] = []
        self._idle: dict[tuple[Any, int], list[_Block]] = defaultdict(list)
        # Events of unfinished work on memory that streams have freed: who cuts a block from a region waits for them.
        self._pending: list[Any] = []
        # By stream and room: bytes in use, and the most there have been. Then the same over all of them.
        self._used: Counter[tuple[Any, int]] = Counter()
        self._most: Counter[tuple[Any, int]] = Counter()
        self._at_once = self._most_at_once = 0
        # The room of the largest request since the last region was added that got torch's memory, or only such as all
        # streams gave back for it.
        self._refused = 0

    def add(self, mapping: Mapping) -> None:
        """Hand out this memory too. Local."""
        with self._lock:
            self._regions.append(_Region(mapping))
            self.size += mapping.size
            self._refused = 0

    def lacking(self, count: int, dtype: torch.dtype) -> int:
        """Bytes of the region to add before the next call of `empty`, with this count and dtype; 0 for none. Local.

        So that this call, and all those so far once more, find room without what other streams give back; as long as
        that is no more than twice what all tensors have had at once.
        """
        with self._lock:
            self._bury()
            room = _room(count * dtype.itemsize)
            key = self._current(), room
            most = self._most.total() + max(0, self._used[key] + room - self._most[key])
            # A program whose sizes never come again would otherwise raise the sum of all maxima for ever.
            most = min(most, 2 * max(self._most_at_once, self._at_once + room))
            # A request that was refused while there was enough in all found only pieces that were too small.
            return max(most - self.size, self._refused, 0)

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of ``[count]``, undefined. Local. In a capture it is in torch's memory, of the graph's own pool."""
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
        """The number of the region that the tensor is in, and the bytes from its begin to the first element; or None.

        None also for a tensor that no pool made.
        """
        address = tensor.data_ptr()
        for number, region in enumerate(self._regions):
            offset = address - region.mapping.bases[region.mapping.rank]
            if is_handed_out(tensor) and 0 <= offset < region.mapping.size:
                return number, offset
        return None

    def peer(self, tensor: torch.Tensor, rank: int, region: int, offset: int) -> torch.Tensor:
        """A tensor like ``tensor``, which is contiguous, in the memory of ``rank``, at what `place_of` returned there.

        It keeps the region mapped, and not the peer's tensor alive.
        """
        storage = self._regions[region].mapping.storage(rank, offset, tensor.nbytes)
        return torch.empty(0, dtype=tensor.dtype, device=self._device).set_(storage, 0, tensor.shape)  # type: ignore[call-overload]

    def record_stream(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Let work on ``stream``, until the tensor dies, hold back its memory, if a region of this pool has that.

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
        """Make the blocks of tensors that have died idle, but for those that died in a capture, which are lost."""
        while self._deaths:
            number, captured = self._deaths.popleft()
            block = self._blocks.pop(number)
            self._used[block.stream, block.room] -= block.room
            self._at_once -= block.room
            if block.region is not None and not captured:
                self._dying.append(block)
        dying, self._dying = self._dying, []
        for block in dying:
            block.others = [stream for stream in block.others if not record_event(stream, block.events)]
            (self._dying if block.others else self._idle[block.stream, block.room]).append(block)

    def _find(self, room: int, stream: Any) -> _Block | None:
        """Memory for a tensor on ``stream``, the current one; None if no region has any."""
        idle = self._idle.get((stream, room))
        if idle:
            block = idle.pop()
            self._wait(stream, block.events)
            block.events = []
            return block
        found = self._cut(room, stream)
        if found is None and any(self._idle.values()):
            # It costs this stream waits, so there is to be room for it next time: under the limit of `lacking`.
            if self.size < 2 * self._most_at_once:
                self._refused = max(self._refused, room)
            self._gather()
            found = self._cut(room, stream)
        return found

    def _cut(self, room: int, stream: Any) -> _Block | None:
        """Memory that belongs to no stream."""
        for region in self._regions:
            offset = region.allocator.allocate(room)
            if offset is not None:
                # Another thread may be capturing a graph, and cudaEventQuery() would invalidate that.
                asks = self._pending and self._device.type == "cuda"
                with relaxed() if asks else nullcontext():
                    self._pending = [event for event in self._pending if not event.query()]
                self._wait(stream, self._pending)
                return _Block(region, offset, room, stream)
        return None

    def _wait(self, stream: Any, events: list[Any]) -> None:
        for event in events:
            self._streams[stream].wait_event(event)

    def _gather(self) -> None:
        """Free all idle blocks, of all streams but those that are being captured, so that neighbours join."""
        blocks = [block for idle in self._idle.values() for block in idle]
        self._idle.clear()
        streams = {block.stream for block in blocks} - {None}
        captured = {stream for stream in streams if not record_event(self._streams[stream], self._pending)}
        for block in blocks:
            if block.stream in captured:
                self._idle[block.stream, block.room].append(block)
                continue
            assert block.region is not None
            self._pending += block.events
            block.region.allocator.free(block.offset)
            block.region.blocks.pop(block.offset, None)


def _room(size: int) -> int:
    """Bytes that a tensor of ``size`` takes, with a gap after it while somebody looks for accesses past its end."""
    return round_up(max(1, size if observer.recorder is None else size + observer.GAP))
