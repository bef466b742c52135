"""Memory for the tensors that a process group hands out, which its collectives then move without staging.

torch asks a group for it with ``allocate_tensor``, as FSDP2 does after
``set_allocate_memory_from_process_group_for_comm``. all_gather stores straight to such an output, and reduce_scatter
reads such an input where it lies, since all ranks reach the memory (`iris.ccl.queue`).

Each rank hands out its memory by itself (`iris.heap.pool`), and nothing depends on where a tensor lies. A tensor for
which there is no room is an ordinary one of torch's, and its collectives go through staging. So ranks must agree only
on when they get more memory, which takes a meeting on the host. They meet at each of the first 16 calls, and then at
call 32, 64, 128 and so on. All ranks make the same calls, so they agree on the number of a call. They do not agree on
what is in use: a tensor may live longer on one rank than on another. A training step makes the same calls again and
again, so memory stops growing within the first steps; of a million calls 31 meet.
"""

import torch

from iris import observer
from iris.context import Iris
from iris.errors import HeapTooLargeError, MappingError, PeerFailedError
from iris.heap import mapping
from iris.heap.pool import Pool

# Bytes of a region at least: what drivers map at once ("CUDA Driver API", cuMemGetAllocationGranularity).
MIN_REGION_BYTES = 2 << 20
# The first calls, at each of which the ranks meet. So a program that asks for a few tensors gets room for all of them.
FIRST_CALLS = 16


class SymmetricMemory:
    """The symmetric memory of one group, on one rank. What meets with other ranks says so."""

    def __init__(self, context: Iris) -> None:
        self._context, self._pool = context, Pool(context.device)
        self._calls = 0
        # Over several hosts, or for one rank alone, no collective has a use for it.
        self._grows = context.num_hosts == 1 and context.num_ranks > 1
        self.record_stream, self.place_of, self.peer = self._pool.record_stream, self._pool.place_of, self._pool.peer

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of ``[count]``, undefined. In the first calls, and in a few later ones, the ranks meet on the host.

        Raises
        ------
        OutOfStepError, IrisTimeoutError
            Other ranks made another call, or none.
        """
        capturing = self._context.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if self._grows and not capturing:
            self._calls += 1
            if self._calls <= FIRST_CALLS or self._calls & (self._calls - 1) == 0:
                self.grow(self._pool.lacking(count, dtype))
        return self._pool.empty(count, dtype)

    def grow(self, lacking: int) -> bool:
        """Map as many more bytes as the rank that is ``lacking`` most needs. Collective; blocks the host.

        Returns whether there is more memory now, the same on all ranks.
        """
        comm = self._context.ccl.communicator()
        group = comm.workspace.group
        nbytes = max(group.all_gather(lacking, f"call {self._calls} of allocate_tensor() of a process group"))
        if not nbytes or not self._grows:
            return False
        nbytes = max(nbytes, MIN_REGION_BYTES)
        try:
            region = mapping.create(
                group, nbytes if observer.recorder is None else observer.with_gaps(nbytes), self._context.device
            )
        except (HeapTooLargeError, MappingError, PeerFailedError) as error:
            # It fails on all ranks alike. From here on tensors without room are torch's own, and go through staging.
            self._grows = False
            self._context.warning(f"This process group's tensors get no more symmetric memory: {error}")
            return False
        comm.add_region(region)
        self._pool.add(region)
        return True
