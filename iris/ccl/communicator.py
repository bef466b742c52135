"""What the collectives of one group share: its memory, who its members are, and launches that are ready."""

from collections.abc import Callable
from typing import Any

import torch

from iris import simulator
from iris.ccl.queue import COUNTS, MAX_RANKS, SLOTS, WORDS, region_bytes
from iris.errors import InvalidGroupError
from iris.heap.symmetric import SymmetricHeap
from iris.launch import prepare
from iris.workspace import Workspace

# Programs that may wait for each other at once: two a multiprocessor of the largest GPUs, with room for as many again.
PROGRAMS = 8 if simulator.ACTIVE else 256

# Bytes of all slots of a channel, and of a slot at most: what 512 threads move in two instructions each.
STAGING_BYTES = (4 << 20) if simulator.ACTIVE else (32 << 20)
LARGEST_SLOT = 16384

Launch = Callable[[int | None, torch.Tensor, torch.Tensor], None]


class Communicator:
    """A group and its workspace. Made collectively, at the group's first use.

    Attributes
    ----------
    rank, size : int
        This rank in the group, and the number of members.
    heap_table : torch.Tensor
        int64 ``[size + 1]``: where the symmetric heap of each member begins, in this rank's addresses; its bytes.
    launches : dict
        Launches that were prepared, by what makes one differ from another.
    configs : list
        The configurations that these keys name by their addresses.
    """

    def __init__(self, workspace: Workspace, heap: SymmetricHeap, num_sms: int) -> None:
        group = workspace.group
        if group.size > MAX_RANKS:
            raise InvalidGroupError(f"A group of {group.size} ranks: the collectives are for {MAX_RANKS} at most.")
        self.workspace, self.heap, self.num_sms = workspace, heap, num_sms
        self.rank, self.size, self.ranks = group.rank, group.size, group.ranks
        self.device = workspace.device
        table = [*(heap.bases[rank] for rank in group.ranks), heap.mapped_size]
        self.heap_table = torch.tensor(table, dtype=torch.int64, device=self.device)
        self.launches: dict[Any, Launch] = {}
        self.configs: list[object] = []

    def programs(self, wanted: int | None) -> int:
        """How many programs there may be, of ``wanted`` (None: one a multiprocessor)."""
        return max(1, min(wanted or self.num_sms, PROGRAMS))

    def slot_bytes(self, programs: int) -> int:
        """Bytes of a slot where so many programs share the staging memory; a power of two."""
        share = STAGING_BYTES // (power_of_two(programs) * SLOTS * self.size)
        return min(LARGEST_SLOT, 1 << (share.bit_length() - 1))

    def queues(self, stream: int | None, capturing: bool, programs: int) -> tuple[Any, ...]:
        """Queues for ``programs`` programs on a stream: counts (int32), words (int64), slots (uint8), bytes of a slot."""
        most, slot_bytes = power_of_two(programs), self.slot_bytes(programs)
        size = region_bytes(most, self.size, slot_bytes)
        channel = self.workspace.channel(f"queues of {most} programs", stream, capturing, size)
        words = most * COUNTS.value * 4
        slots = words + most * WORDS.value * 8
        return channel[:words].view(torch.int32), channel[words:slots].view(torch.int64), channel[slots:], slot_bytes


def power_of_two(number: int) -> int:
    """The next power of two, so that calls of similar size share channels."""
    return 1 << (number - 1).bit_length()


def ready(
    kernel: Any, programs: int, num_warps: int, before: tuple, tensors: tuple, after: tuple, dtype: torch.dtype
) -> Launch:
    """A launch of ``kernel(*before, input, output, *after)``, where ``tensors`` are input and output as of ``dtype``.

    Later calls give other tensors, whose addresses are divisible by 16 where these are.
    """
    launch = prepare(
        kernel, (programs, 1, 1), *before, *(as_words(x, dtype) for x in tensors), *after, num_warps=num_warps
    )
    if simulator.ACTIVE:
        return lambda stream, x, y: launch(stream, *before, as_words(x, dtype), as_words(y, dtype), *after)
    # Addresses, so that the launcher does not ask the driver what kind of memory each pointer is.
    addresses = tuple(x.data_ptr() if isinstance(x, torch.Tensor) else x for x in before)
    keep = before

    def enqueue(stream: int | None, x: torch.Tensor, y: torch.Tensor) -> None:
        launch(stream, *addresses, x.data_ptr(), y.data_ptr(), *after)

    enqueue.keeps_alive = keep
    return enqueue


def as_words(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """One element of ``dtype`` where ``tensor`` begins: what a kernel needs to know of it."""
    if tensor.dtype == dtype:
        return tensor
    begin = tensor.storage_offset() * tensor.itemsize
    first = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return first.set_(tensor.untyped_storage(), begin, (dtype.itemsize,)).view(dtype)
