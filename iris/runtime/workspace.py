"""The library's own symmetric memory: flags and staging of one group's channels, apart from what users allocate.

A *channel* is memory that one operation uses in calls that follow each other. Two uses that may overlap in time never
share one:

* Outside a graph a channel belongs to (operation, n-th stream on which this rank used it). Streams are numbered in
  order of first use, which is the same on every rank of a symmetric program; their handles are not.
* Inside a CUDA graph it belongs to (operation, line of graphs, branch of the graph): see `iris.cuda_graphs.capture`.
  Graphs of one line never run at once, so on each rank the calls that use the channel follow each other, whichever
  graph is replayed: a kernel begins when the one before it is over, or lets it begin, as on a stream. The ranks replay
  the same graphs in the same order, so the n-th call on a channel is the same one everywhere. That is all that a
  channel asks for, since what it counts is in device memory. A graph may be replayed on any stream, beside eager calls,
  so these have other channels.

Channels lie in blocks of segments that all groups of the same ranks share (`iris.heap.segments`). A group has no memory
before its first channel, and takes another block when the last one is full: what it needs, or a quarter of what it has.
Eager calls and graphs have blocks of their own, so that those of graphs can be given back.

Channels are zero at first. What is in them counts epochs for the life of the group and is never reset, so no call needs
the host, nor a meeting beforehand.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist

from iris.cuda_graphs.capture import GraphLine, Line, Lines, outside_captures
from iris.errors import ChannelsExhaustedError, readable
from iris.failures.device_record import DeviceRecord
from iris.heap import SymmetricHeap, mapping, segments
from iris.heap.dump import contents
from iris.heap.segments import Block
from iris.language.context_tensor import context_tensor
from iris.runtime.abort import AbortFlag
from iris.world import Group, World

# Channels start on lines of their own: peers write them at the same time, and kernels get equally aligned pointers,
# hence one compiled specialisation.
ALIGNMENT = 1024

# A 128th of the device's memory at most: 1.1 GiB of an H200. The largest channels have 32 MiB, or for pushed sums a
# 16th of it, and while there is room a fifth.
SHARE_OF_MEMORY = 128
# A block has so many bytes at least, and no more than the largest beyond what is needed at once. Memory of the host
# takes no room until it is used.
SMALLEST_BLOCK = {"cpu": 8 << 20, "cuda": 512 << 10}
LARGEST_BLOCK = 32 << 20


class Channel(NamedTuple):
    """``memory``: uint8. ``context_tensor``: what kernels initialise a device context of that memory from.

    ``counts``: which of the bytes are int32 that count epochs; ``describe``: says what these are, in words.
    """

    memory: torch.Tensor
    context_tensor: torch.Tensor
    block: Block
    begin: int
    counts: slice
    describe: Callable[[np.ndarray], str]


Key = tuple[str, Line]


class Workspace:
    """The library's memory of one group, and its abort flag. It has no channels at first.

    To make one is collective over ``group`` and blocks the host.
    """

    def __init__(self, group: Group, device: torch.device, record: DeviceRecord) -> None:
        self.group, self.device = group, device
        self._lines = Lines()
        self._segments = segments.join(group, device)
        most = mapping.total_memory(device) // SHARE_OF_MEMORY // ALIGNMENT * ALIGNMENT
        # Members of one group may have different GPUs.
        self.limit = min(group.all_gather(most, "the first operation of a group (the most memory it may have)"))
        self.abort_flag = AbortFlag(group, device, record)
        self._channels: dict[Key, Channel] = {}
        self._refused: set[Key] = set()
        self._eager, self._captured = _Blocks(), _Blocks()
        self._context_tensors: dict[str, torch.Tensor] = {}

    def line(self, stream: int | None, capturing: bool) -> Line:
        """The line of a call on the stream with this handle (None in the simulator), which may be capturing a graph."""
        return self._lines.find(stream) if capturing else stream

    def channel(
        self,
        operation: str,
        line: Line,
        size: int,
        counts: slice,
        describe: Callable[[np.ndarray], str] = contents,
    ) -> Channel:
        """``size`` bytes for ``operation`` on a `line`.

        Equal calls get equal channels, with the size of the first. Collective, and blocks the host, where another block
        is needed. ``operation``, ``counts`` and ``describe`` (see `Channel`) are also for people: to say what a hung
        kernel waits for.
        """
        key = (operation, line)
        if key not in self._channels:
            blocks = self._captured if isinstance(line, GraphLine) else self._eager
            room = -(-size // ALIGNMENT) * ALIGNMENT
            if room > blocks.room:
                self._grow(blocks, room)
            block, begin = blocks.cut(room)
            memory = block.memory[begin : begin + size]
            self._channels[key] = Channel(memory, self._context_tensor(block), block, begin, counts, describe)
        return self._channels[key]

    def admits(self, operation: str, line: Line, size: int, left: int) -> bool:
        """Whether a call may use this channel: it exists, or ``left`` bytes stay free when it is made.

        All ranks must get the same answer, but they do not all ask at the same calls: a rank also prepares a launch
        when its own tensors lie otherwise, and there may be less room by then. So the first call that asks decides. It
        is the same call on all ranks. If it is admitted it makes the channel; what it is refused is refused for good.
        """
        key = (operation, line)
        if key not in self._channels and self.room - size < left:
            self._refused.add(key)
        return key not in self._refused

    @property
    def room(self) -> int:
        """Bytes that it may still take."""
        return self.limit - self._eager.size - self._captured.size

    def name_in(self, block: Block, offset: int) -> tuple[str, str]:
        """What uses the block there, and which of its bytes that is, in words."""
        for key, channel in self._channels.copy().items():
            if channel.block is block and 0 <= offset - channel.begin < len(channel.memory):
                return self._name(key), f"byte {offset - channel.begin}"
        return f"memory of the library at offset {block.begin + offset:#x}", "which nothing uses"

    def progress_in(self, block: Block) -> list[str]:
        """The block's channels that have been used, with their counts on this rank. Local; any thread; waits for no
        kernel."""
        lines = []
        for key, channel in self._channels.copy().items():
            if channel.block is not block:
                continue
            begin, end, _ = channel.counts.indices(len(channel.memory))
            at = block.begin + channel.begin + begin
            counts = block.mapping.snapshot(at, end - begin).view(np.int32)
            if counts.any():
                lines.append(f"{self._name(key)}: {channel.describe(counts)}")
        return lines

    def progress(self) -> list[str]:
        """`progress_in` of all blocks."""
        return [line for block in (*self._eager.blocks, *self._captured.blocks) for line in self.progress_in(block)]

    def release_captures(self) -> None:
        """Give back the channels of all captures. Collective; blocks the host.

        The caller guarantees that no graph will be replayed that was captured before.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        # Not before all replays are over, which the peers' have to do with this rank's memory.
        self.group.all_gather(None, "the release of graphs: all replays are over")
        self._channels = {key: channel for key, channel in self._channels.items() if not isinstance(key[1], GraphLine)}
        self._refused = {key for key in self._refused if not isinstance(key[1], GraphLine)}
        self._lines.forget()
        self._segments.give_back(self._captured.blocks)
        self._captured = _Blocks()
        self.group.all_gather(None, "the release of graphs: the memory is free")

    def close(self) -> None:
        """Give all memory back. Local. The caller guarantees that no kernel of this rank uses it any more."""
        self.abort_flag.close()
        self._segments.give_back([*self._eager.blocks, *self._captured.blocks])
        # They go when no group of the same ranks is left.
        del self._segments
        self._channels, self._eager, self._captured = {}, _Blocks(), _Blocks()

    def _grow(self, blocks: "_Blocks", room: int) -> None:
        used = self._eager.size + self._captured.size
        if used + room > self.limit:
            graphs = len({key[1].graphs for key in self._channels if isinstance(key[1], GraphLine)})
            raise ChannelsExhaustedError(readable(room), readable(self.limit), len(self._channels), graphs)
        size = room
        if self.group.size > 1:
            # More than is needed now, so that it has to be done a few times only.
            more = max(SMALLEST_BLOCK[self.device.type], min(blocks.size // 4, LARGEST_BLOCK))
            size = min(max(room, more), self.limit - used)
        blocks.add(self._segments.take(self.group, size, self, "make room for another operation of a group"))

    def _context_tensor(self, block: Block) -> torch.Tensor:
        shared = block.mapping
        if shared.name not in self._context_tensors:
            with outside_captures(self.device):
                self._context_tensors[shared.name] = context_tensor(
                    self.group.rank, shared.bases, shared.size, self.abort_flag.record, self.device
                )
        return self._context_tensors[shared.name]

    def _name(self, key: Key) -> str:
        operation, line = key
        if isinstance(line, GraphLine):
            return f"{operation} in a captured graph"
        streams = [of for name, of in self._channels.copy() if name == operation and not isinstance(of, GraphLine)]
        return f"{operation} on stream {streams.index(line) + 1} of {len(streams)}"


class _Blocks:
    """The blocks of eager calls, or those of graphs. Channels are cut from the last block, one after the other."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._begin = 0

    @property
    def size(self) -> int:
        """Bytes of all."""
        return sum(block.size for block in self.blocks)

    @property
    def room(self) -> int:
        """Bytes of the last block that no channel has."""
        return self.blocks[-1].size - self._begin if self.blocks else 0

    def add(self, block: Block) -> None:
        self.blocks.append(block)
        self._begin = 0

    def cut(self, size: int) -> tuple[Block, int]:
        """The block, and where in it ``size`` bytes begin, for which there is room."""
        begin, self._begin = self._begin, self._begin + size
        return self.blocks[-1], begin


class RankContext(Protocol):
    """What collectives and fused operations use of the context that they belong to: `iris.context.Iris` is one."""

    cur_rank: int
    num_ranks: int
    num_hosts: int
    device: torch.device
    gpu_id: int
    heap: SymmetricHeap
    _world: World
    _workspaces: dict[dist.ProcessGroup | None, Workspace]
    _spanning: dict[dist.ProcessGroup | None, World]

    def get_cu_count(self) -> int: ...

    def get_device_context(self) -> torch.Tensor: ...

    def is_symmetric(self, tensor: torch.Tensor) -> bool: ...

    def device_barrier(self, group: dist.ProcessGroup | None = None) -> None: ...

    def _named(self, process_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None: ...

    def _workspace(self, process_group: dist.ProcessGroup | None) -> Workspace: ...
