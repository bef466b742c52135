"""What a kernel tells its host: the first thing that went wrong in it, noted in device memory.

Kernels write the record where a wait exceeds its limit (`iris.wait_limit`) and, with ``IRIS_DEBUG=1``, where they reach
a peer by a pointer that is not in their context's heap. The host looks at it whenever it has drained a stream anyway.
With neither switched on, there is nothing of it in the generated code.
"""

from collections.abc import Callable

import torch

from iris.errors import IrisTimeoutError, NotSymmetricError
from iris.heap.history import debugging
from iris.wait_limit import NANOSECONDS, VARIABLE

# Words of the record. Of a barrier, SEEN is a bit for each rank from FIRST on that has arrived, of RANKS ranks.
CLAIMED, CLOCK, PROGRAM, FLAG, WANTED, SEEN, KIND, FIRST, RANKS = range(9)
WORDS = 9
# Behind them, and not part of what is said once and then forgotten: the address at which kernels that are traced write
# their events; and the header of a trace without room, for as long as there is no other.
TRACE, NO_TRACE, SIZE = 15, 16, 18
BARRIER_LANES = 32

# What the record is about: a wait, by its comparison; a barrier; a pointer; words that carry their own arrival, FIRST
# being the rank that they were to come from (of a group), or -1 for any; the queues of a collective; a lock.
KINDS = ("eq", "ne", "gt", "ge", "lt", "le", "barrier", "pointer", "data", "queue", "lock", "reached")
_SYMBOLS = {"eq": "==", "ne": "!=", "gt": ">", "ge": ">=", "lt": "<", "le": "<=", "reached": "at or past"}

CHECKS_POINTERS: bool = debugging()
"""Whether kernels on GPUs check pointers. (The simulator always does, and raises at once.)"""


class DeviceRecord:
    """The record of one rank's device."""

    def __init__(self, device: torch.device) -> None:
        memory = torch.zeros(SIZE, dtype=torch.int64, device=device)
        self._words, self._trace = memory[:WORDS], memory[TRACE : TRACE + 1]
        self._trace[0] = memory[NO_TRACE:].data_ptr()
        self.address = memory.data_ptr()

    def trace_into(self, buffer: torch.Tensor) -> None:
        """Have kernels that are traced write their events there. The caller keeps the memory alive."""
        self._trace[0] = buffer.data_ptr()

    def raise_if_claimed(self, rank: int, describe: Callable[[int], str | None]) -> None:
        """Raise what a drained stream's kernels have recorded, and forget it.

        Copies from the device if anything is switched on. ``describe`` turns an address into words, or returns None.

        Raises
        ------
        IrisTimeoutError
            A wait exceeded its limit.
        NotSymmetricError
            A kernel reached a peer by a pointer that is not in its context's heap.
        """
        if NANOSECONDS == 0 and not CHECKS_POINTERS:
            return
        words = self._words.tolist()
        if not words[CLAIMED]:
            return
        self._words.zero_()
        kind, who = KINDS[words[KIND]], f"Rank {rank}: program {words[PROGRAM]} of a kernel"
        place = describe(words[FLAG]) or f"address {words[FLAG]:#x}, not in any heap"
        if kind == "pointer":
            raise NotSymmetricError(
                f"{who} reached a peer by way of a pointer to {place}, and not to the heap of the kernel's context (or "
                "heap_bases). Pass tensors that this context has made: ctx.zeros(), ctx.as_symmetric(), ..."
            )
        wanted, seen, first = words[WANTED], words[SEEN], words[FIRST]
        if kind in ("barrier", "queue"):
            expected = range(first, min(first + BARRIER_LANES, words[RANKS]))
            late = [peer for peer in expected if not seen >> (peer - first) & 1]
            what = f"in a barrier for epoch {wanted}; ranks {late} of its group had not arrived"
            if kind == "queue":
                what = f"in a collective for block {wanted}, or for room for it; ranks {late} of its group were behind"
        elif kind == "data":
            what = f"for data from {'its peers' if first < 0 else f'rank {first} of its group'}"
        elif kind == "lock":
            what = f"for a lock that another program holds ({place})"
        else:
            what = f"for a flag to be {_SYMBOLS[kind]} {wanted}; it held {seen} ({place})"
        raise IrisTimeoutError(
            f"{who} waited for more than {NANOSECONDS / 1e9:g} s {what}. The kernel went on without it, so its results "
            f"are not valid. Look at who should have signalled; {VARIABLE} sets the limit."
        )
