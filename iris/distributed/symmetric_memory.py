"""Memory for the tensors that a process group hands out, which its collectives then move without staging.

torch asks groups for it by ``allocate_tensor``; FSDP2 does after ``set_allocate_memory_from_process_group_for_comm``.
all_gather stores straight to such an output, and reduce_scatter reads such an input where it lies, since all ranks
reach the memory (`iris.ccl.queue`).

Each rank hands out its memory by itself (`iris.heap.pool`), and nothing depends on where a tensor lies: a tensor for
which there was no room is torch's, and takes the way through staging. So all that ranks must agree on is when they get
more memory, which takes a meeting on the host. They meet at each of the first 16 calls, and then at number 32, 64, 128
and so on. Numbers of calls are what ranks have in common, as they are those of collectives; what is in use on a rank is
not, since a tensor may live longer on one than on another. A training step makes the same calls again and again, so
memory stops growing within the first few; of a million calls 31 meet.
"""

import torch

from iris import observer
from iris.context import Iris
from iris.errors import HeapTooLargeError, MappingError, PeerFailedError
from iris.heap import mapping
from iris.heap.pool import Pool

# What a region has at least, as drivers map so much at once ("CUDA Driver API", cuMemGetAllocationGranularity).
SMALLEST = 2 << 20
# So many calls all find room: a program that asks for a few tensors has them there.
ALWAYS = 16


class SymmetricMemory:
    """That of one group on one rank. Local."""

    def __init__(self, context: Iris) -> None:
        self._context, self._pool = context, Pool(context.device)
        self._calls = 0
        # Over several hosts, or for one rank alone, nobody has a use for it.
        self._grows = context.num_hosts == 1 and context.num_ranks > 1
        self.record_stream, self.place_of, self.peer = self._pool.record_stream, self._pool.place_of, self._pool.peer

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of ``[count]``, undefined. In the first calls, and then in few, the ranks meet on the host.

        Raises
        ------
        OutOfStepError, IrisTimeoutError
            The others are at another call, or do not call.
        """
        capturing = self._context.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if self._grows and not capturing:
            self._calls += 1
            if self._calls <= ALWAYS or self._calls & (self._calls - 1) == 0:
                self.grow(self._pool.lacking(count, dtype))
        return self._pool.empty(count, dtype)

    def grow(self, lacking: int) -> bool:
        """Get as much more memory as any rank lacks; whether there is more now. Collective; blocks the host."""
        comm = self._context.ccl.communicator()
        group = comm.workspace.group
        size = max(group.all_gather(lacking, f"call {self._calls} of allocate_tensor() of a process group"))
        if not size or not self._grows:
            return False
        size = max(size, SMALLEST)
        try:
            region = mapping.create(
                group, size if observer.recorder is None else observer.with_gaps(size), self._context.device
            )
        except (HeapTooLargeError, MappingError, PeerFailedError) as error:
            # On all ranks alike. Tensors without room are torch's, and take the way through staging.
            self._grows = False
            self._context.warning(f"This process group's tensors get no more symmetric memory: {error}")
            return False
        comm.add_region(region)
        self._pool.add(region)
        return True
