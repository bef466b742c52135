"""Symmetric memory of calls that follow each other on one stream, or in one graph.

Each kind of call has counts of its own, which only rise (`iris.ops.counts`). What peers store lies in the same place
for all kinds, as cuBLAS' workspace does for all its products: so memory is that of the largest call, however many
numbers of rows there are.

Why a call may store where the one before it, of whatever kind, was used: it waits for ``ready`` of a rank, which that
sends when all that its stream had before is over; and no call is over on a rank while a peer has still to store to that
rank's memory, or to load from it. Every call of every kind keeps both.
"""

import weakref

import torch

from iris.heap import mapping
from iris.heap.tensor_map import places
from iris.language.context_tensor import context_tensor
from iris.ops.buffers import Buffers, Needs, round_up
from iris.runtime.abort import AbortFlag
from iris.world import Group

# Bytes of counts, of a few KiB for each kind: for some hundred. A call needs nobody else before these are used up.
COUNT_BYTES = 4 << 20


class Arena:
    """Made collectively by all ranks with the same sizes; blocks the host.

    Attributes
    ----------
    mapping : Mapping
        The memory: counts, then data.
    context_tensor : torch.Tensor
        What kernels initialise a device context of this memory from.
    places : torch.Tensor
        Where that of each rank is in a tensor map of all: see `iris.heap.tensor_map`.
    abort_flag : AbortFlag
        Of the group that it belongs to.
    """

    def __init__(
        self, group: Group, device: torch.device, abort_flag: AbortFlag, count_bytes: int, data_bytes: int
    ) -> None:
        self.abort_flag = abort_flag
        self.data_bytes = data_bytes
        # Where the next kind's counts begin, and where they have to end.
        self._next, self._first_byte = 0, round_up(count_bytes)
        size = self._first_byte + max(1, data_bytes)
        self.mapping = mapping.create(group, size, device)
        self.mapping.owner = weakref.ref(self)
        self._kinds: weakref.WeakSet[Buffers] = weakref.WeakSet()
        self.mapping.buffer[: self._first_byte].zero_()
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        self.places = places(self.mapping)
        self.context_tensor = context_tensor(group.rank, self.mapping.bases, size, abort_flag.record, device)
        group.all_gather(None, "a workspace of fused operations")

    def has_room(self, needs: Needs) -> bool:
        """Whether calls of one more kind, that need this, can use it."""
        return needs.count_bytes <= self._first_byte - self._next and needs.data_bytes <= self.data_bytes

    def take(self, needs: Needs) -> Buffers:
        """What calls of a kind use, for which there is room. The same place on all ranks, if these ask alike."""
        buffers = Buffers(self, needs, self._next, self._first_byte)
        self._next += needs.count_bytes
        self._kinds.add(buffers)
        return buffers

    def name_at(self, offset: int) -> tuple[str, str]:
        """What uses the memory there, and which part of it that is, in words."""
        found = self._find(offset)
        if found is not None:
            buffers, part = found
            return f"workspace of {buffers.use}", part
        uses = sorted(buffers.use for buffers in self._kinds)
        of = uses[0] if len(uses) == 1 else f"{len(uses)} kinds of fused operations"
        if offset < self._first_byte:
            return f"workspace of {of}", "counts that nothing uses"
        return f"workspace of {of}", f"byte {offset - self._first_byte} of the data"

    def describe_offset(self, offset: int) -> str:
        """The same for messages about waits, which are told how far ranks are."""
        use, part = self.name_at(offset)
        found = self._find(offset)
        return f"{use}: {part}" if found is None else f"{use} (calls begun by each rank: {found[0].begun()}): {part}"

    def progress(self) -> list[str]:
        """The counts of each kind on this rank that have been used. Local; any thread; waits for no kernel."""
        return [line for buffers in sorted(self._kinds, key=lambda each: each.use) for line in buffers.progress()]

    def close(self) -> None:
        """Unmap. The caller guarantees that no kernel uses the memory any more, on any rank."""
        self.mapping.close()

    def _find(self, offset: int) -> tuple[Buffers, str] | None:
        """Whose counts are there, and what this one is, in words."""
        for buffers in list(self._kinds):
            part = buffers.name_count(offset)
            if part is not None:
                return buffers, part
        return None
