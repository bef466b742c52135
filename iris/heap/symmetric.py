"""The symmetric heap: tensors at the same offset on every rank.

Contract
--------
*Allocating is local*: ranks that make the same calls get the same offsets without a message.

*Freeing is collective*, and happens only where all ranks are at the same point of their programs: in a barrier of the
whole world, and where the heap is full (which it is on all ranks at once). There each rank tells which blocks it no
longer uses, and what every rank no longer uses is taken back, on all of them alike. So a rank whose garbage collector
runs later than another's delays the reuse of memory and changes nothing else.

*Memory is mapped within a host*: ranks of other hosts have objects at the same offsets, but no address here.

*What could go wrong is noticed*: the ranks compare their allocations whenever they meet.

A heap belongs to one thread: allocations from several threads have no order that ranks could share.
"""

import math
import operator
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from iris import observer
from iris.compat.storage import lazily_negated
from iris.errors import (
    FreedTensorError,
    HeapClosedError,
    InvalidDtypeError,
    InvalidShapeError,
    NotATensorError,
    NotSymmetricError,
    RemoteRankError,
    short_repr,
)
from iris.heap.allocator import Allocator, HeapStats, round_up
from iris.heap.dump import dump
from iris.heap.history import History, tensor_text
from iris.heap.lifetime import Life, Lifetimes
from iris.heap.mapping import create, mappings
from iris.heap.reclamation import Block, Reclamation
from iris.world import Group, Hosts, inspection

# The heaps of this process, by the address of this rank's bytes.
_live: "weakref.WeakValueDictionary[int, SymmetricHeap]" = weakref.WeakValueDictionary()


class SymmetricHeap:
    """A heap of the same size on every rank of a group. Construction is collective and blocks the host.

    Parameters
    ----------
    group
        The ranks that share the heap.
    size
        Bytes on each rank, the same on all.
    device
        Where this rank's bytes are.
    hosts
        The hosts of these ranks; None: they are on one.

    Attributes
    ----------
    bases : tuple of int
        The address, in this process, of each rank's heap; 0 for ranks of other hosts.
    mapping : Mapping
        The memory of this host's ranks, by local rank.

    Raises
    ------
    InvalidHeapSizeError, MismatchedHeapError, HeapTooLargeError, MappingError, PeerFailedError
        As `iris.heap.mapping.create`.
    """

    def __init__(self, group: Group, size: int, device: torch.device, hosts: Hosts | None = None) -> None:
        # While somebody looks for accesses that run into the next block, there is a gap after each one.
        mapped = size if observer.recorder is None else observer.with_gaps(size)
        self.hosts = hosts if hosts is not None and len(hosts) > 1 else None
        self.mapping = create(group, mapped, device, None if self.hosts is None else self.hosts.group)
        self.group, self.size, self.device = group, operator.index(size), device
        bases = self.mapping.bases
        self.bases = bases if self.hosts is None else self.hosts.by_rank(bases)
        self._base = self.bases[group.rank]
        self._allocator = Allocator(self.mapping.size)
        self._lifetimes = Lifetimes(device)
        self._history = History()
        # Blocks by number, which counts allocations and so is the same on all ranks.
        self._blocks: dict[int, Block] = {}
        self._reclamation = Reclamation(group, self.size, self._blocks, self._allocator, self._lifetimes, self._history)
        self.closed = False
        self.mapping.owner = weakref.ref(self)
        _live[self._base] = self
        inspection.listen()

    @property
    def mapped_size(self) -> int:
        """Bytes from a heap's base to its end: the size that was asked for, rounded up."""
        return self.mapping.size

    def empty(self, shape: Sequence[int], dtype: torch.dtype, requires_grad: bool = False) -> torch.Tensor:
        """A contiguous tensor with undefined content, at the same offset on every rank.

        All ranks must make the same allocations in the same order. Local, unless the heap is full: then all ranks meet
        on the host to take back what has died.

        Raises
        ------
        HeapOutOfMemoryError
            No room, also after that; raised on all ranks.
        IrisTimeoutError
            A rank did not come, or its kernels kept the memory in use, for the time limit of the process group.
        AsymmetricHeapError
            The ranks asked for different things.
        """
        self.check_open()
        if not isinstance(dtype, torch.dtype):
            raise InvalidDtypeError(f"A dtype is one of torch's, such as torch.float32; {short_repr(dtype)} is none.")
        shape = tuple(map(operator.index, shape))
        if min(shape, default=0) < 0:
            raise InvalidShapeError(f"A tensor cannot have the shape {list(shape)}: an extent is negative.")
        size = math.prod(shape) * dtype.itemsize
        call = self._history.add(size, shape, dtype)
        room = size if observer.recorder is None else size + observer.GAP
        offset = self._allocator.allocate(room)
        if offset is None:
            self._reclamation.make_room(room)
            offset = self._allocator.allocate(room)
        assert offset is not None
        self._history.add_offset(offset)
        number = self._history.count
        self._blocks[number] = Block(offset, size, shape, dtype, call)
        storage = self.mapping.storage(self.mapping.rank, offset, size, self._lifetimes.begin(number))
        tensor = torch.empty(0, dtype=dtype, device=self.device)
        tensor = tensor.set_(storage, 0, shape)  # type: ignore[call-overload]
        if observer.recorder is not None:
            observer.recorder.allocated(self._base + offset, size, tensor_text(shape, dtype), undefined=True)
        return tensor.requires_grad_() if requires_grad else tensor

    def free(self, tensor: torch.Tensor) -> None:
        """Give back the memory of ``tensor`` and of all its views, although they are still alive.

        Local. The memory is reused when every rank has freed it (or let it die) and the ranks have met. Nothing may use
        the tensor or its views any more.

        Raises
        ------
        NotSymmetricError
            The tensor was not made on this heap.
        FreedTensorError
            It was freed before.
        """
        symmetric = self.is_symmetric(tensor)
        life = getattr(tensor.untyped_storage(), "iris_owner", None) if symmetric else None
        if not isinstance(life, Life):
            raise NotSymmetricError(
                f"{_show(tensor)} was not made on this heap, so it cannot be freed there. free() takes tensors of this "
                "context's factories, such as ctx.zeros()."
            )
        if life.freed:
            raise FreedTensorError(f"{_show(tensor)} was freed before; free a tensor once.")
        life.end()

    def meet(self, point: str = "barrier()") -> None:
        """Wait on the host for all ranks, compare allocations, and take back what no rank uses any more.

        Collective over the whole group; blocks the host. Does not wait for any stream: memory that unfinished work may
        be using comes back at a later meeting.

        Parameters
        ----------
        point
            In words, where in the program this is: it must be the same on all ranks.

        Raises
        ------
        AsymmetricHeapError
            The ranks' allocations differ, or their points do; on all ranks.
        IrisTimeoutError
            A rank did not come.
        """
        self.check_open()
        self._reclamation.reclaim(point)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Let work on ``stream`` hold back memory that dies.

        Needed only for a stream on which kernels use the heap and which never was the current one when a tensor was
        made or the ranks met.
        """
        self._lifetimes.record_stream(stream)

    def is_symmetric(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's memory is in this rank's heap."""
        self.check_open()
        if not isinstance(tensor, torch.Tensor):
            raise NotATensorError(tensor)
        try:
            # The data pointer of a tensor without elements is null, that of its storage is not.
            address = tensor.untyped_storage().data_ptr()
        except (RuntimeError, ValueError):  # of one without memory (`iris.operators.stand_ins`)
            return False
        return tensor.device == self.device and self._base <= address < self._base + self.mapping.size

    def offset(self, tensor: torch.Tensor) -> int:
        """Bytes from the start of the heap to the tensor's first element; NotSymmetricError if it is elsewhere."""
        self._check_symmetric(tensor)
        within = tensor.storage_offset() * tensor.element_size()
        return int(tensor.untyped_storage().data_ptr() - self._base + within)

    def peer(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """``rank``'s copy of ``tensor`` for use by torch: a tensor of the same shape, strides, dtype and offset.

        Local. Nothing is ordered: when the peer's writes are visible is up to the caller's barriers. While the result
        lives, the memory under it is not reused.

        Raises
        ------
        NotSymmetricError, RankOutOfRangeError
        RemoteRankError
            ``rank`` is on another host.
        """
        self._check_symmetric(tensor)
        if self.hosts is not None:
            self.check_local(rank)
            rank = self.hosts.local_ranks.index(rank)
        own = tensor.untyped_storage()
        life = getattr(own, "iris_owner", None)
        storage = self.mapping.storage(rank, own.data_ptr() - self._base, own.nbytes(), life)
        view = torch.empty(0, dtype=tensor.dtype, device=self.device)
        view = view.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        # What torch does only when the elements are used.
        view = torch.conj(view) if tensor.is_conj() else view
        return lazily_negated(view) if tensor.is_neg() else view

    def check_local(self, rank: int) -> None:
        """Raise `RemoteRankError` if a rank is on another host, `RankOutOfRangeError` if there is no such rank."""
        if self.hosts is not None and not self.hosts.is_local(rank):
            raise observer.reported(RemoteRankError(rank, self.hosts.name_of(rank)))

    def stats(self) -> HeapStats:
        """What is in use. The same on every rank, because a block is in use until all ranks have taken it back."""
        self.check_open()
        return self._allocator.stats()

    def allocations(self) -> list[tuple[Block, bool]]:
        """The blocks in use, and whether this rank's tensor of each is dead: it was freed, or nothing holds it.

        What a graph may use is not dead.
        """
        blocks, done = self._blocks.copy(), self._reclamation.done.copy()
        dead = self._lifetimes.dead() | {number for number, ranks in done.items() if ranks >> self.group.rank & 1}
        return [(block, number in dead) for number, block in blocks.items()]

    def version(self) -> tuple[int, ...]:
        """A value that changes whenever `allocations` does."""
        return self._history.count, len(self._blocks), len(self._reclamation.done), self._lifetimes.num_dead

    def block_at(self, offset: int) -> Block | None:
        """The block in use that has this offset, in itself or in the padding that rounds its size up."""
        for block in self._blocks.copy().values():
            if 0 <= offset - block.offset < round_up(max(block.size, 1)):
                return block
        return None

    def successor(self, number: int, offset: int, size: int) -> Block | None:
        """The block in use that overlaps these bytes, which were of block ``number``; None while that is in use."""
        if number in self._blocks:
            return None
        blocks = self._blocks.copy().values()
        return next((each for each in blocks if each.offset < offset + size and offset < each.offset + each.size), None)

    def name_at(self, offset: int) -> tuple[str, str]:
        """Which tensor is there, or was until it died, and what of it, in words."""
        block, origin = self.block_at(offset), ""
        if block is None:
            reclaimed = reversed(self._reclamation.reclaimed)
            block = next((block for block in reclaimed if 0 <= offset - block.offset < max(block.size, 1)), None)
            if block is None:
                return f"heap at offset {offset:#x}", "where no tensor is"
            origin = " that has died"
        within = offset - block.offset
        origin = block.origin + origin
        if within >= block.size:
            return origin, f"{within - block.size} bytes past its end (offset {within:#x})"
        return origin, f"element {within // block.dtype.itemsize} (offset {within:#x})"

    def describe_offset(self, offset: int) -> str:
        """The same for messages about faults."""
        return ", ".join(self.name_at(offset))

    def dump(self) -> str:
        """What this rank's heap holds, for people: each tensor in use, with the contents of small ones of integers.

        It says how full this rank's heap is, and lists the tensors in use by their offsets, with the line that made
        each (in debug mode) and whether it waits to be freed. Of integer tensors of up to 1 MiB it shows the contents:
        all elements if there are up to 32, else how often each value occurs, or the range of many different ones.
        Local; works from any thread, also while a kernel hangs: it waits for none.

        Raises
        ------
        HeapClosedError
            After `close`.
        """
        self.check_open()
        return dump(self)

    def close(self) -> None:
        """Let go of the memory. Local. Tensors that are still alive stay valid; everything else raises afterwards."""
        if not self.closed:
            self.closed = True
            self.mapping.close()
            _live.pop(self._base, None)

    def check_open(self) -> None:
        if self.closed:
            raise HeapClosedError("This heap was closed. Make a new context with iris.iris() before using it.")

    def _check_symmetric(self, tensor: torch.Tensor) -> None:
        if not self.is_symmetric(tensor):
            raise NotSymmetricError(
                f"{_show(tensor)} is not on this rank's symmetric heap. Make it with a factory of the context, such as "
                "ctx.zeros(), or copy it there with ctx.as_symmetric(). For a peer's copy, which ctx.peer() has given, "
                "pass your own tensor, whose copy it is."
            )


def _show(tensor: torch.Tensor) -> str:
    return f"The tensor {tensor_text(tensor.shape, tensor.dtype)} on {tensor.device}"


def heap_named(name: str) -> SymmetricHeap | None:
    """This process' heap whose mapping has that name."""
    return next((heap for heap in list(_live.values()) if heap.mapping.name == name), None)


def heap_at(base: int) -> SymmetricHeap | None:
    """This process' heap that begins there in its own memory."""
    return _live.get(base)


def live_heaps() -> list[SymmetricHeap]:
    """This process' heaps that are open."""
    return list(_live.values())


def _memories() -> Iterator[dict[str, Any]]:
    """Each memory that this process shares with other ranks, for `iris.world.inspection`. Local; any thread."""
    for mapping in mappings():
        owner = mapping.owner()
        if owner is None or mapping.memory is None:
            continue
        is_heap = isinstance(owner, SymmetricHeap)
        try:
            lines = owner.dump().splitlines() if is_heap else owner.progress()
        except Exception as error:  # closed meanwhile, or a device that has failed: the rest is worth as much
            lines = [f"Not to be read: {type(error).__name__}: {error}"]
        yield {
            "kind": "heap" if is_heap else "library",
            "rank": mapping.ranks[mapping.rank],
            "ranks": list(mapping.ranks),
            "device": str(mapping.device),
            "lines": lines,
        }


inspection.memory_reports.append(_memories)
