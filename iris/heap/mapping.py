"""Memory of the same size on every rank, which every rank can address.

A provider (`iris.heap.host`, `iris.heap.gpu`) gets the memory and says at which address this process sees each rank's.
A `Mapping` is what the rest of the library needs to know about it.
"""

import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from iris import observer
from iris.arg_parser import index
from iris.compat.storage import storage_at
from iris.errors import (
    HeapClosedError,
    HeapTooLargeError,
    InvalidHeapSizeError,
    MappingError,
    MismatchedHeapError,
    RankOutOfRangeError,
    readable,
)
from iris.heap import gpu
from iris.heap import host as in_main_memory
from iris.heap.allocator import round_up
from iris.world import Group

# The translation in kernels moves pointers by multiples of this (iris/language/address.py).
CONGRUENCE = 16

# The mappings of this process, by the address of this rank's bytes.
_mappings: "weakref.WeakValueDictionary[int, Mapping]" = weakref.WeakValueDictionary()

# How many have been made by each group: the same number on all members.
_made: Counter[str] = Counter()


class Memory:
    """What keeps addresses valid for as long as it lives, which others may follow by a weak reference."""

    def __init__(self, held: Any) -> None:
        self._held = held


class Losses(Protocol):
    """Which members have ended, in words."""

    def __call__(self, well: bool) -> list[str]: ...


@dataclass
class Mapping:
    """One rank's view of memory that a group shares.

    Attributes
    ----------
    name : str
        Another one for every mapping, and the same on all members.
    ranks : tuple of int
        The members' ranks in the world.
    rank : int
        This rank in the group.
    size : int
        Bytes on each rank.
    device : torch.device
        The device of the tensors over it.
    bases : tuple of int
        The address, in this process, of each rank's bytes; congruent modulo 16.
    memory : Memory
        What keeps the addresses valid for as long as it lives, as it does while a tensor is over it; None once closed.
    lost : callable
        Returns which members have ended, and ranks of other hosts, in words: `iris.world.members.Members.lost`.
    owner : callable
        Returns what uses the memory, or None: a weak reference. It has methods ``name_at(offset)``, what the memory is
        for and which part of that is there, and ``describe_offset(offset)``, both in one text. One in which the flags
        of several ranks that a kernel waits for at once are not next to each other has an attribute ``flags_apart``.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    size: int
    device: torch.device
    bases: tuple[int, ...]
    memory: Memory | None
    lost: Losses
    owner: Callable[[], Any] = lambda: None

    def storage(self, rank: int, offset: int, size: int, owner: Any = None) -> torch.UntypedStorage:
        """A storage of its own over ``size`` bytes of a rank's memory.

        The storage, and so every view of a tensor on it, keeps the memory mapped, and ``owner`` alive.

        Raises
        ------
        RankOutOfRangeError
            ``rank`` is not in the group.
        HeapClosedError
            After `close`.
        """
        if self.memory is None:
            raise HeapClosedError("This memory was closed; nothing new can be made on it.")
        if index(rank) not in range(len(self.bases)):
            raise observer.reported(RankOutOfRangeError(rank, len(self.bases)))
        storage = storage_at(self.bases[rank] + offset, self.device, size)
        # A storage keeps its Python object, with its attributes, for as long as a tensor uses it.
        storage.iris_memory = self.memory
        storage.iris_owner = owner
        return storage

    def peer(self, rank: int) -> torch.Tensor:
        """A rank's bytes, as a uint8 tensor of shape ``[size]``."""
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(self.storage(rank, 0, self.size))

    @property
    def buffer(self) -> torch.Tensor:
        """This rank's bytes, as a uint8 tensor of shape ``[size]``."""
        return self.peer(self.rank)

    def snapshot(self, offset: int, size: int) -> np.ndarray:
        """A copy of ``size`` of this rank's bytes as they are now, uint8. Local; waits for no kernel, in any thread.

        Raises
        ------
        HeapClosedError
            After `close`.
        """
        own = self.storage(self.rank, offset, size)
        return snapshot(torch.empty(0, dtype=torch.uint8, device=self.device).set_(own, 0, (size,), (1,)))

    def close(self) -> None:
        """Let go of the memory: it is unmapped when the last tensor over it has died."""
        self.memory = None


def total_memory(device: torch.device) -> int:
    """The memory of the device that a mapping would be on, in bytes."""
    return (in_main_memory if device.type == "cpu" else gpu).total_memory(device)


def create(group: Group, size: int, device: torch.device, host: Group | None = None) -> Mapping:
    """Share ``size`` bytes of every member. Collective; blocks the host; undone on all members if it fails on one.

    ``size`` is rounded up as the allocator rounds. The bytes are zero on the CPU and undefined on a GPU.

    ``host``: the members on this host, where there are several. The memory is shared among these, and the mapping has
    their ranks; the others do the same at the same time, and all agree.

    Raises
    ------
    InvalidHeapSizeError
        Not a number of bytes; `PeerFailedError` on members that gave one that is.
    MismatchedHeapError
        Members asked for different sizes; raised on all.
    HeapTooLargeError
        More than the device has; `PeerFailedError` on members where it would have worked.
    MappingError
        The memory cannot be shared.
    """

    provider = in_main_memory if device.type == "cpu" else gpu
    members = group if host is None else host
    bases: list[int] = []
    held: Any = None

    def check_size() -> int:
        asked = index(size)
        if asked is None or asked < 0 or isinstance(size, bool):
            raise InvalidHeapSizeError(size)
        total = total_memory(device)
        if asked > total:
            raise HeapTooLargeError(
                f"A heap of {readable(asked)} is larger than the memory of {device}, {readable(total)}. "
                "Ask for a smaller one."
            )
        return asked

    sizes = group.agree(check_size, "make a heap of the size that it was asked for")
    if len(set(sizes)) > 1:
        asked = ", ".join(f"{readable(size)} on rank {rank}" for rank, size in zip(group.ranks, sizes, strict=True))
        raise MismatchedHeapError(
            f"A heap has the same size on every rank, and these differ: {asked}. Give all ranks one heap_size."
        )
    rounded = round_up(max(sizes[0], 1))

    def share() -> None:
        nonlocal bases, held
        bases, held = provider.share(members, rounded, device)

    if members is group:
        share()
    else:
        group.agree(share, "share memory within its host")

    def check_congruence() -> None:
        if len({base % CONGRUENCE for base in bases}) > 1:
            raise MappingError(
                f"The heaps are at {', '.join(map(hex, bases))}, which are not congruent modulo {CONGRUENCE} as the "
                f"translation needs (process {os.getpid()}). Please report this with the version of torch."
            )

    group.agree(check_congruence, "map the heaps at congruent addresses")
    name = f"{members.name}/memory/{_made[members.name]}"
    memory = Memory(held)
    mapping = Mapping(name, members.ranks, members.rank, rounded, device, tuple(bases), memory, group.members.lost)
    _mappings[bases[members.rank]] = mapping
    # After it: another thread that sees this number looks for it.
    _made[members.name] += 1
    return mapping


def snapshot(memory: torch.Tensor) -> np.ndarray:
    """A copy of these bytes, uint8, as they are now. Local; waits for no kernel, in any thread."""
    return (in_main_memory if memory.device.type == "cpu" else gpu).snapshot(memory)


def mappings() -> list[Mapping]:
    """Those of this process that are in use."""
    return list(_mappings.values())


def locate(address: int) -> tuple[Mapping, int, int] | None:
    """The open mapping of this process that ``address`` is in, the rank in its group whose memory that is, and the
    offset there; or None."""
    for mapping in mappings():
        for rank, base in enumerate(mapping.bases):
            if mapping.memory is not None and 0 <= address - base < mapping.size:
                return mapping, rank, address - base
    return None


def describe_address(address: int) -> str | None:
    """What is at ``address`` in any memory that this process shares, a heap or the library's own, in words, or None."""
    found = locate(address)
    if found is None:
        return None
    mapping, rank, offset = found
    owner = mapping.owner()
    what = f"memory at offset {offset:#x}" if owner is None else owner.describe_offset(offset)
    return f"rank {mapping.ranks[rank]}'s {what}"


def lost_at(addresses: Iterable[int], well: bool) -> list[str]:
    """Which ranks have ended that share the memory of any of these addresses, and how, in words. Local; any thread.

    ``well``: also those whose programs have ended well.
    """
    found = {mapping.name: mapping for mapping, *_ in filter(None, map(locate, addresses))}
    return list(dict.fromkeys(text for mapping in found.values() for text in mapping.lost(well)))


def count_made() -> int:
    """How many this process has made: another number when `mappings` may say something new."""
    return _made.total()


def is_mapped(base: int) -> bool:
    """Whether this rank's bytes of an open mapping begin at the address ``base``."""
    mapping = _mappings.get(base)
    return mapping is not None and mapping.memory is not None
