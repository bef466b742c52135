"""Memory shared between the GPUs of one host, by ``torch.distributed._symmetric_memory`` (CUDA and ROCm)."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from iris.compat import symmetric_memory
from iris.cuda_graphs.capture import side_stream
from iris.cuda_graphs.kept import keep
from iris.errors import HeapTooLargeError, MappingError, readable
from iris.heap.allocator import ALIGNMENT
from iris.world import Group

# Held by the thread of this process that exchanges handles.
_exchanging = threading.Lock()


def total_memory(device: torch.device) -> int:
    """The memory of a GPU in bytes."""
    return torch.cuda.get_device_properties(device).total_memory


def snapshot(memory: torch.Tensor) -> np.ndarray:
    """A copy of ``memory``, uint8 and contiguous, as it is now.

    A copy of bytes to pageable memory on a stream of its own: there is no kernel to load and no page to lock, either of
    which may wait for a kernel that hangs (CUDA C++ Programming Guide, "Lazy Loading" and "Implicit Synchronization").
    """
    # The device too: a thread that is at another one must not come back to it by making a context there.
    with torch.cuda.device(memory.device), torch.cuda.stream(side_stream(memory.device)):
        return memory.cpu().numpy()


def share(group: Group, size: int, device: torch.device) -> tuple[list[int], Any]:
    """Share ``size`` bytes of every member's GPU, undefined at first. Collective; blocks the host.

    Returns
    -------
    bases : list of int
        The address of each member's bytes in this process, multiples of `ALIGNMENT`.
    memory : object
        Keeps them mapped while it lives.
    """
    # Room to start at a multiple of ALIGNMENT: torch may put words of its own before what it hands out.
    room = size + ALIGNMENT
    own: torch.Tensor | None = None
    handle: Any = None

    def allocate() -> None:
        nonlocal own
        try:
            if group.size == 1:
                own = keep(lambda: torch.empty(room, dtype=torch.uint8, device=device), device)
            else:
                own = symmetric_memory.allocate(room, device)
        except RuntimeError as error:
            free, total = torch.cuda.mem_get_info(device)
            raise HeapTooLargeError(
                f"{device} has no room for a heap of {readable(size)}: {readable(free)} of {readable(total)} are free. "
                f"Ask for a smaller heap, or free memory first. ({_first_line(error)})"
            ) from error

    def exchange() -> None:
        nonlocal handle
        assert own is not None
        shared = own
        try:
            name = f"{group.name}/symmetric_memory/{group.meetings}"
            store = dist.PrefixStore(f"symmetric_memory/{group.meetings}", group.store)
            with symmetric_memory.without_multicast(), symmetric_memory.registered(name, store, group.rank, group.size):
                # Which allocates too: tables of the peers' addresses.
                handle = keep(lambda: symmetric_memory.rendezvous(shared, name), device)
        except RuntimeError as error:
            raise MappingError(
                f"torch could not share memory of {device} with the other ranks' GPUs: {_first_line(error)}. "
                "Are all GPUs connected, and may the processes exchange file descriptors?"
            ) from error
        if handle.buffer_ptrs[group.rank] != own.data_ptr():
            raise MappingError(
                f"torch shares memory from {handle.buffer_ptrs[group.rank]:#x}, and the heap is at "
                f"{own.data_ptr():#x}. Please report this with the version of torch ({torch.__version__})."
            )

    try:
        group.agree(allocate, "allocate its heap")
        if group.size == 1:
            assert own is not None
            starts = [own.data_ptr()]
        else:
            with turn(group):
                group.agree(exchange, "share its heap with its peers")
            starts = list(handle.buffer_ptrs)
    except BaseException:
        # The traceback keeps this frame, and the frame would keep the memory.
        own = handle = None
        raise
    # Whole pages are mapped, so an address has the same remainder in every process, and all agree on what to skip.
    return [start + -start % ALIGNMENT for start in starts], (own, handle)


@contextlib.contextmanager
def turn(group: Group) -> Iterator[None]:
    """Here no other thread of any member exchanges handles. Collective, right after a meeting; blocks the host.

    torch sends handles through a socket that is named after the process, so a process can do one exchange at a time.
    Threads that use two groups may come in another order on each rank. So the members try at once, which nobody waits
    in; if one of them fails, they take the locks one after the other, in the order of their ranks in the world. All
    groups have that order, so no circle of waits can come to be. Nobody holds a lock while a member has yet to come, as
    one that does something else before might need that lock: all have just met.
    """
    what = "its turn to share memory"
    mine = _exchanging.acquire(blocking=False)
    try:
        if not all(group.all_gather(mine, what)):
            if mine:
                _exchanging.release()
                mine = False
            for rank in sorted(group.ranks):
                if rank == group.ranks[group.rank]:
                    mine = _exchanging.acquire()
                group.all_gather(None, what)
        yield
    finally:
        if mine:
            _exchanging.release()


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")
