"""The library's own symmetric memory: the flags of one group's channels, apart from what users allocate.

A *channel* is a row of flags that one operation uses on one stream. Two uses that may overlap in time never share one:

* Outside a graph a channel belongs to (operation, n-th stream on which this rank used it). Streams are numbered in
  order of first use, which is the same on every rank of a symmetric program; their handles are not.
* Every call that is captured into a CUDA graph gets a channel of its own, numbered in the order of captures. A graph
  may be replayed at any time and beside other work, and nobody can see its end, so its channels are never used again
  before the context is closed.

Flags count epochs for the life of the context and are never reset, so no call needs the host, nor a meeting beforehand.
"""

import torch

from iris.device_record import DeviceRecord
from iris.errors import ChannelsExhaustedError
from iris.heap import mapping
from iris.language.context import context_tensor
from iris.world import Group

FLAG_BYTES = 1 << 20

# Channels start on cache lines of their own: peers write them at the same time, and kernels get equally aligned
# pointers, hence one compiled specialisation.
LINE_BYTES = 128


class Workspace:
    """Collective over ``group``: its members map each other's flags, and meet before anyone uses them."""

    def __init__(self, group: Group, device: torch.device, record: DeviceRecord) -> None:
        self.group = group
        self._mapping = mapping.create(group, FLAG_BYTES, device)
        flags = self._mapping.buffer.view(torch.int32)
        flags.zero_()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        group.all_gather(None, "the first use of a group")
        stride = -(-group.size * flags.itemsize // LINE_BYTES) * LINE_BYTES // flags.itemsize
        self._rows = flags[: flags.numel() // stride * stride].view(-1, stride)[:, : group.size]
        self._channels: dict[tuple[str, int | None], int] = {}
        self._captured = 0
        self.context_tensor = context_tensor(group.rank, self._mapping.bases, FLAG_BYTES, record.address, device)

    def channel(self, operation: str, stream: int | None) -> torch.Tensor:
        """This rank's flags of ``operation`` on a stream (its handle; None in the simulator): int32 ``[1, size]``."""
        key = (operation, stream)
        if key not in self._channels:
            self._check_room()
            self._channels[key] = len(self._channels)
        return self._row(self._channels[key])

    def captured_channel(self) -> torch.Tensor:
        """Flags for one call inside a graph capture."""
        # From the end, so that captures do not shift the numbers of streams.
        self._check_room()
        self._captured += 1
        return self._row(self._rows.shape[0] - self._captured)

    def close(self) -> None:
        """Unmap. The caller guarantees that no kernel uses the flags any more, on any rank."""
        self._mapping.close()

    def _check_room(self) -> None:
        if len(self._channels) + self._captured == self._rows.shape[0]:
            raise ChannelsExhaustedError(self._rows.shape[0])

    def _row(self, index: int) -> torch.Tensor:
        return self._rows[index : index + 1]
