"""What a kernel may reach from where: asked in the simulator before each access to a peer (`iris.language.address`)."""

import numpy as np

from iris import observer
from iris.errors import (
    InvalidContextError,
    KernelBoundsError,
    NotSymmetricError,
    NotTheCallerError,
    RankOutOfRangeError,
)
from iris.heap.mapping import describe_address, is_mapped
from iris.heap.symmetric import heap_at, live_heaps


def check_reach(
    addresses: np.ndarray, mask: np.ndarray | bool | None, base: np.ndarray, ranks: np.ndarray | int
) -> None:
    """Raise unless a kernel may use these addresses as its own in the heap at ``base``, to reach these ranks.

    Elements that ``mask`` leaves out are not looked at. A ``mask`` of False, where it is not known which are used:
    ranks are checked, and no addresses. Nothing is looked at if ``base`` is that of the library's own memory.

    Raises
    ------
    NotSymmetricError
        An address is not in the caller's heap.
    RankOutOfRangeError
        The heap has no such rank.
    RemoteRankError
        It is on another host.
    NotTheCallerError
        The heap at ``base`` is a peer's.
    InvalidContextError
        No open memory of this process is at ``base``.
    """
    own = int(base.item())
    heap = heap_at(own)
    if heap is None:
        for other in live_heaps():
            if own in other.bases:
                # All ranks of other hosts have the base 0.
                passed = other.bases.index(own) if own else "that of a rank on another host"
                raise NotTheCallerError(
                    f"Rank {other.group.rank} called a device operation that takes the caller's rank, and passed "
                    f"{passed}. A pointer is always into the caller's own heap; the signature says "
                    "which argument is the caller and which the peer."
                )
        if not is_mapped(own):
            raise InvalidContextError(
                f"A kernel got a context (or heap_bases) of no open heap: this rank's would be at {own:#x}. "
                "Pass ctx.get_device_context() or ctx.get_heap_bases() of a context that has not been closed."
            )
        return
    _check_ranks(ranks, heap.group.size)
    check_local(ranks, None if mask is False else mask, base)
    if mask is not None:
        addresses, active = np.broadcast_arrays(addresses, mask)
        addresses = addresses[active]
    outside = (addresses < own) | (addresses >= own + heap.mapped_size)
    if outside.any():
        address = int(addresses[outside][0])
        place = describe_address(address) or "not in any heap"
        raise NotSymmetricError.of_pointer(f"A kernel reaches a peer by way of address {address:#x}, which is {place}.")


def check_local(ranks: np.ndarray | int, mask: np.ndarray | bool | None, base: np.ndarray) -> None:
    """Raise `RemoteRankError` if one of these ranks, where ``mask`` says so, is on another host.

    Nothing is looked at if ``base`` is no heap's: the library's own memory is this host's.
    """
    heap = heap_at(int(base.item()))
    if heap is None or heap.hosts is None:
        return
    if mask is not None:
        ranks, active = np.broadcast_arrays(ranks, mask)
        ranks = ranks[active]
    for rank in np.unique(ranks):
        heap.check_local(int(rank))


def check_row(flags: np.ndarray, row: np.ndarray, num_ranks: np.ndarray | int, base: np.ndarray, width: int) -> None:
    """Raise `KernelBoundsError` unless the tensor at ``flags`` has the ``row`` of a program in a barrier.

    A row has a flag of ``width`` bytes for each rank. Nothing is looked at if ``base`` is that of the library's own
    memory, or if no tensor is there.
    """
    first, own, ranks = (int(np.asarray(each).item()) for each in (flags, base, num_ranks))
    heap = heap_at(own)
    block = None if heap is None else heap.block_at(first - own)
    if block is None:
        return
    program = (int(row.item()) - first) // width // ranks
    there = (own + block.offset + block.size - first) // width
    if (program + 1) * ranks > there:
        error = KernelBoundsError(
            f"A barrier has too few flags: program {program} of a kernel needs a tensor of shape "
            f"[{program + 1}, {ranks}] or larger, a flag for each program and rank, and {block.origin} has "
            f"{max(0, there)} from the pointer on. Pass ctx.zeros((programs, {ranks}), dtype=torch.int32)."
        )
        raise observer.mistake("bounds", error)


def check_rank(ranks: np.ndarray | int, base: np.ndarray) -> None:
    """Raise `RankOutOfRangeError` unless the heap at ``base`` has these ranks."""
    heap = heap_at(int(base.item()))
    if heap is not None:
        _check_ranks(ranks, heap.group.size)


def check_caller(ranks: np.ndarray | int, first: np.ndarray) -> None:
    """Raise `RankOutOfRangeError` unless the table of heap bases whose first one is ``first`` has this rank.

    Of a table of no open heap nothing is known. Where rank 0 is on another host, its base is 0 in every table.
    """
    sizes = [heap.group.size for heap in live_heaps() if heap.bases[0] == int(first.item())]
    if sizes:
        _check_ranks(ranks, max(sizes))


def _check_ranks(ranks: np.ndarray | int, size: int) -> None:
    for rank in np.ravel(ranks):
        if not 0 <= rank < size:
            raise RankOutOfRangeError(int(rank), size)


def check_copy(from_rank: np.ndarray | int, to_rank: np.ndarray | int, cur_rank: np.ndarray | int) -> None:
    """Raise `NotTheCallerError` unless a copy's caller is one of the two ranks that it names."""
    for sender, receiver, caller in np.broadcast(from_rank, to_rank, cur_rank):
        if caller not in (sender, receiver):
            raise NotTheCallerError(
                f"Rank {caller} called copy() from rank {sender} to rank {receiver}, and is neither of them. "
                "Let one of the two call: the first sends, or the second fetches."
            )
