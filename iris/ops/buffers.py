"""Symmetric memory of one fused operation: what its kernels count in, and where peers store."""

import weakref
from typing import NamedTuple

import numpy as np
import torch

from iris.device_record import DeviceRecord
from iris.errors import WorkspaceTooSmallError, readable
from iris.heap import mapping
from iris.heap.dump import contents
from iris.heap.tensor_map import places
from iris.language.context import context_tensor
from iris.ops.counts import ARRIVED, DONE, READY
from iris.world import Group

ALIGNMENT = 1024


class Needs(NamedTuple):
    """What a call's workspace has: ``parts`` counts of parts, ``elements`` of ``dtype``; ``kind`` as in `Buffers`.

    And for tiles that several programs compute, by halves (`iris.ops.hopper.split_k`): ``halves`` counts, and
    ``partials``, so many float32 of each rank's own.
    """

    kind: tuple
    parts: int
    elements: int
    dtype: torch.dtype
    halves: int = 0
    partials: int = 0


class Buffers:
    """A workspace: made collectively, for calls of one kind, on one stream or in one graph at a time.

    Attributes
    ----------
    kind : tuple
        What calls it is for: the operation, shapes, dtype and configuration.
    context_tensor : torch.Tensor
        What kernels initialise a device context of this memory from.
    counts : torch.Tensor
        int32, zeros at first: see `iris.ops.counts`.
    data : torch.Tensor
        So many elements of the dtype asked for, the same place on every rank.
    split_counts, partials : torch.Tensor
        int32, zeros at first, and float32: of tiles that several programs compute.
    mapping : Mapping
        The memory of all of it.
    places : torch.Tensor
        Where that of each rank is in a tensor map of all: see `iris.heap.tensor_map`.
    """

    def __init__(self, group: Group, device: torch.device, record: DeviceRecord, needs: Needs) -> None:
        self.kind = needs.kind
        self._halves = ARRIVED.value + needs.parts
        count_bytes = -(-4 * (self._halves + needs.halves) // ALIGNMENT) * ALIGNMENT
        data_bytes = needs.elements * needs.dtype.itemsize
        size = count_bytes + max(1, -(-data_bytes // ALIGNMENT)) * ALIGNMENT
        self.mapping = mapping.create(group, size, device)
        self.mapping.owner = weakref.ref(self)
        whole = self.mapping.buffer
        self.counts = whole[:count_bytes].view(torch.int32)
        self._data = slice(count_bytes, count_bytes + data_bytes)
        self.data = whole[self._data].view(needs.dtype)
        self.split_counts = self.counts[self._halves :]
        self.partials = torch.empty(needs.partials, dtype=torch.float32, device=device)
        self.counts.zero_()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.places = places(self.mapping)
        self.context_tensor = context_tensor(group.rank, self.mapping.bases, size, record.address, device)
        group.all_gather(None, "a workspace of a fused operation")

    def check(self, kind: tuple) -> None:
        """That the workspace is for calls like this one."""
        if kind != self.kind:
            raise WorkspaceTooSmallError(
                f"The workspace was prepared for {_told(self.kind)}, and this call is {_told(kind)}. Prepare one for "
                "it with the preamble, or leave `workspace` out."
            )

    def peer(self, rank: int) -> torch.Tensor:
        """The ``data`` of another rank."""
        return self.mapping.peer(rank)[self._data].view(self.data.dtype)

    def peer_counts(self, rank: int) -> torch.Tensor:
        """The ``counts`` of another rank."""
        return self.mapping.peer(rank)[: self._data.start].view(torch.int32)

    def name_at(self, offset: int) -> tuple[str, str]:
        """What this is, and what of it lies there, in words."""
        use, word = f"workspace of {self._use()}", offset // 4
        if offset >= self._data.start:
            return use, f"byte {offset - self._data.start} of the data"
        if word >= self._halves:
            return use, f"splits of half {(word - self._halves) % 2} of split tile {(word - self._halves) // 2}"
        if word >= ARRIVED.value:
            return use, f"what has arrived of part {word - ARRIVED.value}"
        if word >= DONE.value:
            return use, "what peers have finished"
        if word >= READY.value:
            return use, f"the calls that rank {self.mapping.ranks[word - READY.value]} has begun"
        return use, f"the calls of program {word}"

    def describe_offset(self, offset: int) -> str:
        """The same for messages about waits, which are told how far ranks are."""
        use, part = self.name_at(offset)
        return f"{use} (calls begun by each rank: {self._begun()}): {part}"

    def progress(self) -> list[str]:
        """The counts on this rank, if there are any. Local; any thread; waits for no kernel."""
        counts = self.mapping.snapshot(0, self._data.start).view(np.int32)
        if not counts.any():
            return []
        return [
            f"workspace of {self._use()}: {counts[: READY.value].max()} calls over, begun by each rank "
            f"{self._begun()}, finished by peers {counts[DONE.value]}, arrived of each part "
            f"{contents(counts[ARRIVED.value : self._halves])}"
        ]

    def _use(self) -> str:
        """The operation and its extents: enough to know it by."""
        name, *rest = self.kind
        return _told((name, *(each for each in rest if isinstance(each, int) and not isinstance(each, bool))))

    def _begun(self) -> list[int]:
        return self.mapping.snapshot(4 * READY.value, 4 * len(self.mapping.ranks)).view(np.int32).tolist()

    def close(self) -> None:
        """Unmap. The caller guarantees that no kernel uses the memory any more, on any rank."""
        self.mapping.close()

    def __repr__(self) -> str:
        return f"<workspace of {readable(self.mapping.size)} for {_told(self.kind)}>"


def _told(kind: tuple) -> str:
    name, *rest = kind
    return f"{name}({', '.join(map(str, rest))})"
