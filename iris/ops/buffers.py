"""Symmetric memory of calls of one kind: what their kernels count in, and where peers store."""

from typing import Any, NamedTuple

import numpy as np
import torch

from iris.errors import HeapClosedError, WorkspaceTooSmallError, readable
from iris.heap.dump import contents
from iris.ops.counts import ARRIVED, DONE, READY
from iris.ops.kernel_arguments import Channel, SplitTiles
from iris.runtime.launch import addresses

# Bytes: counts and data begin at multiples of these, as tensors on the heap do.
ALIGNMENT = 1024


class Needs(NamedTuple):
    """What a call's workspace has to have; ``kind`` as in `Buffers`.

    ``parts``: counts of what has arrived, one for each part that travels by itself. ``elements`` of ``dtype``: what
    peers store, or load. ``tickets``: counts by which programs take what nobody has. For tiles that several programs
    compute (`iris.ops.hopper.split_k`): ``halves``, a count for each half of such a tile, and ``partials``, so many
    float32, which are each rank's own.
    """

    kind: tuple
    parts: int
    elements: int
    dtype: torch.dtype
    halves: int = 0
    partials: int = 0
    tickets: int = 0

    @property
    def count_bytes(self) -> int:
        """Of all counts, rounded up."""
        return round_up(4 * (ARRIVED.value + self.parts + self.tickets + self.halves))

    @property
    def sent_bytes(self) -> int:
        """Of what peers store, rounded up."""
        return round_up(self.elements * self.dtype.itemsize)

    @property
    def data_bytes(self) -> int:
        """Of all but the counts, rounded up."""
        return self.sent_bytes + round_up(4 * self.partials)


def round_up(size: int) -> int:
    """So that what begins after it is equally aligned for every kind."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Buffers:
    """What calls of one kind use of an `iris.ops.arena.Arena`, on one stream or in one graph at a time.

    Attributes
    ----------
    needs : Needs
        What it has.
    kind : tuple
        What calls it is for: the operation, shapes, dtype and configuration.
    arena : Arena
        Whose memory it is.
    counts : torch.Tensor
        int32, zeros at first, of this kind alone: see `iris.ops.counts`.
    data : torch.Tensor
        So many elements of the dtype asked for, the same place on every rank. All kinds of the arena share it.
    split_counts, partials : torch.Tensor
        int32, zeros at first, and float32, which all kinds share: of tiles that several programs compute.
    mapping, context_tensor, places
        The arena's.
    tensors, addresses : dict
        What kernels may take of these, by the names of their parameters; and the addresses for launches.
    mover : object
        What moves the data of these calls beside the kernel, if anything does. It lives as long as this.
    maps : dict
        Tensor maps of this memory, by the names of kernels' parameters, once a kernel has needed them.
    """

    def __init__(self, arena: Any, needs: Needs, first_count: int, first_byte: int) -> None:
        """``first_count``, ``first_byte``: where the counts and the data begin in the arena."""
        self.needs, self.kind, self.arena = needs, needs.kind, arena
        self.mover: Any = None
        self.maps: dict[str, Any] = {}
        self.mapping, self.context_tensor, self.places = arena.mapping, arena.context_tensor, arena.places
        self._tickets = ARRIVED.value + needs.parts
        self._halves = self._tickets + needs.tickets
        self._counts = slice(first_count, first_count + needs.count_bytes)
        self._data = slice(first_byte, first_byte + needs.elements * needs.dtype.itemsize)
        whole = self.mapping.buffer
        self.counts = whole[self._counts].view(torch.int32)
        self.data = whole[self._data].view(needs.dtype)
        self.split_counts = self.counts[self._halves :]
        first = first_byte + needs.sent_bytes
        self.partials = whole[first : first + 4 * needs.partials].view(torch.float32)
        self.tensors = {
            "channel": Channel(self.context_tensor, self.counts),
            "gathered": self.data,
            "parts": self.data,
            "split_tiles": SplitTiles(self.partials, self.split_counts),
            "parts_places": self.places,
        }
        self.addresses = dict(zip(self.tensors, addresses(tuple(self.tensors.values())), strict=True))

    def check(self, kind: tuple) -> None:
        """That the workspace is open, and for calls like this one."""
        if self.mapping.memory is None:
            raise HeapClosedError(f"The workspace of {self.use} was closed. Prepare another one with the preamble.")
        if kind != self.kind:
            raise WorkspaceTooSmallError(
                f"The workspace was prepared for {_describe(self.kind)}, and this call is {_describe(kind)}. "
                "Prepare one for it with the preamble, or leave `workspace` out."
            )

    def peer(self, rank: int) -> torch.Tensor:
        """The ``data`` of another rank."""
        return self.mapping.peer(rank)[self._data].view(self.data.dtype)

    def peer_counts(self, rank: int) -> torch.Tensor:
        """The ``counts`` of another rank."""
        return self.mapping.peer(rank)[self._counts].view(torch.int32)

    @property
    def use(self) -> str:
        """The operation and its extents, in words: enough to know it by."""
        return use_of(self.kind)

    def name_count(self, offset: int) -> str | None:
        """What this byte of the arena counts, in words; None if it is none of these counts."""
        word = (offset - self._counts.start) // 4
        if not self._counts.start <= offset < self._counts.stop:
            return None
        if word >= self._halves:
            return f"splits of half {(word - self._halves) % 2} of split tile {(word - self._halves) // 2}"
        if word >= self._tickets:
            return f"ticket {word - self._tickets} of what programs take"
        if word >= ARRIVED.value:
            return f"what has arrived of part {word - ARRIVED.value}"
        if word >= DONE.value:
            return "what peers have finished"
        if word >= READY.value:
            return f"the calls that rank {self.mapping.ranks[word - READY.value]} has begun"
        return f"the calls of program {word}"

    def begun(self) -> list[int]:
        """The calls that each rank has begun. Local; any thread; waits for no kernel."""
        return self._snapshot()[READY.value :][: len(self.mapping.ranks)].tolist()

    def progress(self) -> list[str]:
        """The counts on this rank, if there are any. Local; any thread; waits for no kernel."""
        counts = self._snapshot()
        if not counts.any():
            return []
        return [
            f"workspace of {self.use}: {counts[: READY.value].max()} calls over, begun by each rank "
            f"{self.begun()}, finished by peers {counts[DONE.value]}, arrived of each part "
            f"{contents(counts[ARRIVED.value : self._tickets])}"
        ]

    def _snapshot(self) -> np.ndarray:
        begin, end = self._counts.start, self._counts.stop
        return self.mapping.snapshot(begin, end - begin).view(np.int32)

    def close(self) -> None:
        """Unmap. The caller guarantees that no kernel uses the memory any more, on any rank."""
        self.arena.close()

    def __repr__(self) -> str:
        return f"<workspace of {readable(self.mapping.size)} for {_describe(self.kind)}>"


def use_of(kind: tuple) -> str:
    """The operation of a kind and its extents, in words: enough to know it by."""
    name, *rest = kind
    return _describe((name, *(each for each in rest if isinstance(each, int) and not isinstance(each, bool))))


def _describe(kind: tuple) -> str:
    name, *rest = kind
    return f"{name}({', '.join(map(str, rest))})"
