"""Memory shared between processes of one user, in the main memory of the machine.

Each rank makes an anonymous file (``memfd_create(2)``), which its peers open through the rank's ``/proc/<pid>/fd``.
It has no name in any file system, so the size of ``/dev/shm`` does not matter, nothing is left behind when a rank is
killed, and only processes that may inspect the rank (the same user) can open it. Pages appear when they are touched:
a large heap costs nothing until it is used.
"""

import errno
import mmap
import os
from typing import Any

import numpy as np
import torch

from iris.errors import MappingError, readable
from iris.world import Group

# For an error of the system that has a remedy of its own.
TOO_MANY_FILES = (
    "This process may not open more files, of which each process group in use takes some for each of its ranks. Allow "
    "more (ulimit -n), or destroy groups that are not needed."
)
ANOTHER_USER = (
    "All ranks must belong to one user and see each other's processes: in containers, share the PID namespace."
)


def total_memory(device: torch.device) -> int:
    """The main memory of this machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def snapshot(memory: torch.Tensor) -> np.ndarray:
    """A copy of ``memory``, uint8."""
    return memory.numpy().copy()


def share(group: Group, size: int, device: torch.device) -> tuple[list[int], Any]:
    """Share ``size`` bytes of every member, zeros. Collective; blocks the host.

    Returns
    -------
    bases : list of int
        The address of each member's bytes in this process.
    memory : object
        Keeps them mapped while it lives.
    """
    maps = _share(group, size, range(group.size))
    return [address_of(each) for each in maps], maps


def share_one(group: Group, size: int) -> mmap.mmap:
    """The same ``size`` bytes for all members, zeros. Collective; blocks the host."""
    return _share(group, size, range(1))[0]


def address_of(memory: mmap.mmap) -> int:
    """Where it is mapped in this process."""
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


def _share(group: Group, size: int, owners: range) -> list[mmap.mmap]:
    """``size`` bytes of each of the ``owners``, by rank in the group, as all members have them mapped."""
    file = -1

    def make() -> tuple[int, int, int] | None:
        nonlocal file
        if group.rank not in owners:
            return None
        try:
            file = os.memfd_create("iris-heap", os.MFD_CLOEXEC)
            os.fchmod(file, 0o600)
            os.ftruncate(file, size)
        except OSError as error:
            remedy = f" {TOO_MANY_FILES}" if error.errno in (errno.EMFILE, errno.ENFILE) else ""
            raise MappingError(f"No shared memory of {readable(size)}: {error}.{remedy}") from error
        return os.getpid(), file, os.fstat(file).st_ino

    maps: list[mmap.mmap] = []

    def attach() -> None:
        for rank in owners:
            file_of_rank = files[rank]
            assert file_of_rank is not None
            process, number, inode = file_of_rank
            path = f"/proc/{process}/fd/{number}"
            try:
                peer = file if rank == group.rank else os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    if os.fstat(peer).st_ino != inode:
                        raise OSError(f"{path} is another file")
                    maps.append(mmap.mmap(peer, size, mmap.MAP_SHARED))
                finally:
                    if peer != file:
                        os.close(peer)
            except OSError as error:
                remedy = TOO_MANY_FILES if error.errno in (errno.EMFILE, errno.ENFILE) else ANOTHER_USER
                raise MappingError(
                    f"The heap of rank {group.ranks[rank]} (process {process}) cannot be mapped: {error}. {remedy}"
                ) from error

    try:
        files = group.agree(make, "make its shared memory")
        group.agree(attach, "map the shared memory of its peers")
    except BaseException:
        # The traceback keeps this frame, and the frame would keep what was mapped.
        maps.clear()
        raise
    finally:
        if file >= 0:
            os.close(file)
    return maps
