"""The library's own symmetric memory: flags and staging of one group's channels, apart from what users allocate.

A *channel* is memory that one operation uses on one stream. Two uses that may overlap in time never share one:

* Outside a graph a channel belongs to (operation, n-th stream on which this rank used it). Streams are numbered in
  order of first use, which is the same on every rank of a symmetric program; their handles are not.
* Inside a CUDA graph it belongs to (capture, operation, n-th stream of that capture). A graph may be replayed at any
  time and beside other work, and nobody can see its end, so its channels are not used again before all ranks have said
  that their graphs are gone.

Channels lie in the order of their first use: those of streams from the start, those of captures from the end, so that
captures do not shift the others. They are zero at first. What is in them counts epochs for the life of the context and
is never reset, so no call needs the host, nor a meeting beforehand.
"""

import weakref
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from iris.capture import capture_id
from iris.device_record import DeviceRecord
from iris.errors import ChannelsExhaustedError, readable
from iris.heap import mapping
from iris.heap.dump import contents
from iris.language.context import context_tensor
from iris.world import Group

# Channels start on lines of their own: peers write them at the same time, and kernels get equally aligned pointers,
# hence one compiled specialisation.
ALIGNMENT = 1024

# A 128th of the device's memory: 1.1 GiB of an H200. The largest channels have 32 MiB, or a 16th of it for pushed sums.
SHARE_OF_MEMORY = 128


class Channel(NamedTuple):
    """``memory``: uint8. ``counts``: which of it are int32 that count epochs; ``told``: what these are, in words."""

    memory: torch.Tensor
    counts: slice
    told: Callable[[np.ndarray], str]


class Workspace:
    """Collective over ``group``: its members map each other's workspace, and meet before anyone uses it."""

    def __init__(self, group: Group, device: torch.device, record: DeviceRecord) -> None:
        self.group, self.device = group, device
        self.size = mapping.total_memory(device) // SHARE_OF_MEMORY // ALIGNMENT * ALIGNMENT
        # Members of one group may have different GPUs.
        self.size = min(group.all_gather(self.size, "the first operation of a group (size of its memory)"))
        self._mapping = mapping.create(group, self.size, device)
        self._mapping.owner = weakref.ref(self)
        self._bytes = self._mapping.buffer
        if device.type == "cuda":
            # Memory of the host is zero already, and takes no room until it is used.
            self._bytes.zero_()
            torch.cuda.synchronize(device)
        group.all_gather(None, "the first operation of a group (its memory)")
        self._channels: dict[tuple[str, int | None, int | None], Channel] = {}
        self._start, self._end = 0, self.size
        self.bases = self._mapping.bases
        self.context_tensor = context_tensor(group.rank, self.bases, self.size, record.address, device)

    def channel(
        self, operation: str, stream: int | None, capturing: bool, size: int, counts: slice,
        told: Callable[[np.ndarray], str] = contents,
    ) -> torch.Tensor:  # fmt: skip
        """This rank's ``size`` bytes for ``operation`` on a stream (its handle; None in the simulator): uint8.

        ``capturing``: a graph is recording the stream. Equal calls get equal channels, with the size of the first.
        ``operation``, ``counts`` and ``told`` (see `Channel`) are also for people: to say what a hung kernel waits for.
        """
        capture = capture_id(stream) if capturing else None
        key = (operation, stream, capture)
        if key not in self._channels:
            room = -(-size // ALIGNMENT) * ALIGNMENT
            if room > self.room:
                raise ChannelsExhaustedError(readable(size), readable(self.size), len(self._channels), self._captures())
            if capturing:
                self._end -= room
                begin = self._end
            else:
                begin = self._start
                self._start += room
            self._channels[key] = Channel(self._bytes[begin : begin + size], counts, told)
        return self._channels[key].memory

    @property
    def room(self) -> int:
        """Bytes that no channel has."""
        return self._end - self._start

    def name_at(self, offset: int) -> tuple[str, str]:
        """What uses the memory there, and which of its bytes that is, in words."""
        for key, channel in self._channels.copy().items():
            within = offset - channel.memory.storage_offset()
            if 0 <= within < len(channel.memory):
                return self._name(key), f"byte {within}"
        return f"memory of the library at offset {offset:#x}", "which nothing uses"

    def describe_offset(self, offset: int) -> str:
        """The same for messages about waits."""
        return ", ".join(self.name_at(offset))

    def progress(self) -> list[str]:
        """The channels that have been used, with their counts on this rank. Local; any thread; waits for no kernel."""
        lines = []
        for key, channel in self._channels.copy().items():
            begin, end, _ = channel.counts.indices(len(channel.memory))
            at = channel.memory.storage_offset() + begin
            counts = self._mapping.snapshot(at, end - begin).view(np.int32)
            if counts.any():
                lines.append(f"{self._name(key)}: {channel.told(counts)}")
        return lines

    def release_captures(self) -> None:
        """Take back the channels of all captures. Collective; blocks the host.

        The caller guarantees that no graph will be replayed that was captured before.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.group.all_gather(None, "the release of graphs: all replays are over")
        self._bytes[self._end :].zero_()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._end = self.size
        self._channels = {key: channel for key, channel in self._channels.items() if key[2] is None}
        self.group.all_gather(None, "the release of graphs: the memory is ready")

    def close(self) -> None:
        """Unmap. The caller guarantees that no kernel uses the channels any more, on any rank."""
        self._mapping.close()

    def _name(self, key: tuple[str, int | None, int | None]) -> str:
        operation, stream, capture = key
        if capture is not None:
            return f"{operation} in a captured graph"
        streams = [other for name, other, of in self._channels.copy() if (name, of) == (operation, None)]
        return f"{operation} on stream {streams.index(stream) + 1} of {len(streams)}"

    def _captures(self) -> int:
        return len({capture for _, _, capture in self._channels if capture is not None})
