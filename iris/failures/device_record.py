"""The device record: words in device memory in which a kernel reports the first error in it to its host.

Kernels write it (`iris.language.failures.write_record`)

* where a wait exceeds its limit (`iris.wait_limit`);
* with ``IRIS_DEBUG=1``, where a pointer through which they reach a peer is not in their context's heap;
* where a lock of `iris.x` holds a value that no kernel of Iris stores there;
* where they address a rank of another host (`iris.language.locality`).

The host reads it whenever it has drained a stream anyway, and raises the error (`DeviceRecord.raise_if_claimed`). On
one host, with neither the limit nor debug mode switched on, only kernels that use `iris.x` have code for it.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from iris.cuda_graphs.kept import keep
from iris.errors import (
    ForeignLockValueError,
    IrisError,
    IrisTimeoutError,
    MismatchedCollectiveError,
    NotSymmetricError,
    RemoteRankError,
    names,
)
from iris.failures.barrier_diagnosis import explain
from iris.heap.history import debugging
from iris.heap.mapping import locate, lost_at
from iris.heap.symmetric import SymmetricHeap
from iris.wait_limit import NANOSECONDS, VARIABLE

# The words of a record, int64.
#
#   CLAIMED          NOTED or GAVE_UP once a kernel has written the record, else 0
#   CLOCK            the latest time that a waiting program has read (`iris.language.failures.nanoseconds`)
#   PROGRAM          which of the launch's PROGRAMS has written it
#   FLAG             the address of the flag, pointer or lock
#   WANTED, SEEN     the value waited for, and the value found; otherwise by kind:
#                    barrier: SEEN has a bit for each rank from FIRST on that has arrived
#                    data: SEEN has a bit for each rank whose data are missing
#                    foreign: WANTED is the rank of the lock; remote: WANTED is the rank of another host
#   KIND             an index into KINDS
#   FIRST, RANKS     the first rank that the flags belong to, and the number of ranks
CLAIMED, CLOCK, PROGRAM, FLAG, WANTED, SEEN, KIND, FIRST, RANKS, PROGRAMS = range(10)
WORDS = 10
# The words after these stay when an error has been raised.
#
#   SECTION          of a group's record: the address in host memory to which a kernel copies the record
#   STATE            of a group's record: the address of the abort flag (`iris.runtime.abort`)
#   MEMBER           of a group's record: the value that a kernel stores to the abort flag
#   NOWHERE          operations without a mask on a rank of another host go here instead; nobody reads it
#   TRACE            the address of the buffer in which traced kernels write their events; at first that of NO_TRACE
#   NO_TRACE         the header of a buffer without room begins here
#
# The first three are 0 in the record of users' kernels. SIZE is the number of words in all.
SECTION, STATE, MEMBER, NOWHERE = 10, 11, 12, 13
TRACE, NO_TRACE, SIZE = 15, 16, 19
# When CLAIMED is GAVE_UP, all other waits with this record give up at once. When it is NOTED they wait on, as what they
# wait for will come.
NOTED, GAVE_UP = 1, 2
# A barrier's flags are handled by so many lanes at a time, so the bits of SEEN are of so many ranks.
BARRIER_LANES = 32

# What the record is about: a wait for a flag, by its comparison; a barrier; a pointer outside the heap; data that are
# their own flag; the queues of a collective; a lock that is held; a lock of tiles with a foreign value ("foreign");
# messages of unequal size; a call that the root of a collective has refused; a rank of another host ("remote").
KINDS = (
    *("eq", "ne", "gt", "ge", "lt", "le", "barrier", "pointer", "data", "queue", "lock", "reached"),
    *("foreign", "size", "refused", "remote"),
)
NOTED_KINDS = ("size", "refused")
_SYMBOLS = {"eq": "==", "ne": "!=", "gt": ">", "ge": ">=", "lt": "<", "le": "<=", "reached": "at or past"}

CHECKS_POINTERS: bool = debugging()
"""Whether kernels on GPUs check pointers. (The simulator always does, and raises at once.)"""


class DeviceRecord:
    """The records of one rank's device: one for users' kernels, and one for each group's own kernels.

    They are separate because all waits with one record give up as soon as one of them has: calls of other groups are
    not to.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._records: list[torch.Tensor] = []
        # The address of the trace buffer, for records of later groups. It is kept on the host: kernels may be waiting
        # when a group is first used, so reading it from the device could block for ever.
        self._trace: int | None = None
        self.address = self._make({}).data_ptr()
        self._words = self._records[0][:WORDS]

    def of_group(self, section: int, state: int, member: int) -> torch.Tensor:
        """A record for a group's kernels, which also report to the host's memory: see `iris.runtime.abort`."""
        return self._make({SECTION: section, STATE: state, MEMBER: member})

    def trace_into(self, buffer: torch.Tensor) -> None:
        """Have traced kernels write their events into ``buffer``. The caller keeps it alive."""
        self._trace = buffer.data_ptr()
        for words in self._records:
            words[TRACE] = self._trace

    def raise_if_claimed(self, rank: int, describe: Callable[[int], str | None], host_of: Callable[[int], str]) -> None:
        """Raise the error that users' kernels have recorded, if there is one, and clear the record. After a drain.

        Copies from the device. ``describe`` turns an address into words, or returns None; ``host_of`` names a rank's
        host.

        Raises
        ------
        IrisTimeoutError
            A wait exceeded its limit.
        NotSymmetricError
            A kernel reached a peer by a pointer that is not in its context's heap.
        ForeignLockValueError
            A kernel found a lock of `iris.x` that somebody else had written.
        RemoteRankError
            A kernel addressed the memory of a rank on another host.
        """
        words = self._words.tolist()
        if words[CLAIMED]:
            self._words.zero_()
            if KINDS[words[KIND]] == "remote":
                remote = words[WANTED]
                raise RemoteRankError(remote, host_of(remote), f"program {words[PROGRAM]} of a kernel of rank {rank}")
            raise error_of(words, rank, describe)

    def _make(self, values: dict[int, int]) -> torch.Tensor:
        def fill(words: torch.Tensor) -> torch.Tensor:
            filled = {TRACE: self._trace or words[NO_TRACE:].data_ptr()} | values
            return words.copy_(torch.tensor([filled.get(word, 0) for word in range(SIZE)]))

        words = keep(lambda: fill(torch.empty(SIZE, dtype=torch.int64, device=self._device)), self._device)
        self._records.append(words)
        return words


def error_of(
    words: list[int], rank: int, describe: Callable[[int], str | None], ranks: Sequence[int] = ()
) -> IrisError:
    """The error that a kernel of this ``rank`` has recorded. ``ranks``: the global ranks of its group."""
    kind, who = KINDS[words[KIND]], f"Rank {rank}: program {words[PROGRAM]} of a kernel"
    if kind == "size":
        return unequal(words, rank, ranks)
    place = describe(words[FLAG]) or f"address {words[FLAG]:#x}, not in any heap"
    if kind == "pointer":
        return NotSymmetricError.of_pointer(f"{who} reached a peer by way of a pointer to {place}.")
    wanted, seen = words[WANTED], words[SEEN]
    if kind == "foreign":
        return ForeignLockValueError(rank, wanted, place, seen)
    if kind == "barrier":
        what = _flags_of_ranks(words, place)
    elif kind == "queue":
        what = f"in a collective for block {wanted}, or for room for it ({place}). {_queues(words)}"
    elif kind == "data":
        what = f"for data from {_sources(words)} ({place})."
    elif kind == "lock":
        what = f"for a lock that another program holds ({place})."
    else:
        what = f"for a flag to be {_SYMBOLS[kind]} {wanted}; it held {seen} ({place})."
    gone = "".join(f" {text}." for text in lost_at([words[FLAG]], well=True))
    return IrisTimeoutError(
        f"{who} waited for more than {NANOSECONDS / 1e9:g} s {what}{gone} The kernel went on without it, so its "
        f"results are not valid. Look at who should have signalled; {VARIABLE} sets the limit."
    )


def from_afar(words: list[int], rank: int, ranks: Sequence[int]) -> str:
    """The text for a record of another rank's kernel, whose addresses mean nothing here."""
    if KINDS[words[KIND]] == "size":
        return str(unequal(words, rank, ranks))
    return f"A kernel of rank {rank} waited for more than {NANOSECONDS / 1e9:g} s and gave up."


def unequal(words: list[int], rank: int, ranks: Sequence[int]) -> MismatchedCollectiveError:
    """The error of messages of unequal size, which the receiver, ``rank``, has recorded."""
    return MismatchedCollectiveError(
        f"The sizes of messages do not agree: rank {ranks[words[FIRST]]} sent {words[SEEN]} bytes, where rank {rank} "
        f"receives {words[WANTED]}. Nothing of that message was received. Give both calls tensors, or counts, of the "
        "same number of bytes."
    )


def _flags_of_ranks(words: list[int], place: str) -> str:
    """What a wait for a flag of each rank was for, and who was late, in words."""
    found = locate(words[FLAG])
    if found is None or not getattr(found[0].owner(), "flags_apart", False):
        return f"in a barrier for epoch {words[WANTED]} ({place}). {_arrivals(words)}"
    # Those of the other ranks are not next to this one, nor are they a barrier's: the record alone says who was late.
    ranks = found[0].ranks
    late = [ranks[rank] for rank in range(words[RANKS]) if not _bit(words, rank)]
    behind = f"Behind: {names(late)}." if late else "None is behind any more."
    return f"for flags of ranks to be at or past {words[WANTED]} ({place}). {behind}"


def _arrivals(words: list[int]) -> str:
    """Who has come to a barrier, in words, by this rank's copy of its flags as it is now."""
    first, size, program = words[FIRST], words[RANKS], words[PROGRAM]
    # A program waits for so many ranks at a time. Those before them had arrived; at those after them it had not looked.
    end = min(first + BARRIER_LANES, size)
    arrived = [rank for rank in range(end) if rank < first or _bit(words, rank - first)]
    found = locate(words[FLAG])
    if found is None:
        return f"Of ranks 0 to {end - 1} of its group, {arrived} had arrived."
    mapping, _, at = found
    owner = mapping.owner()
    block = owner.block_at(at) if isinstance(owner, SymmetricHeap) else None
    dtype = np.dtype(np.int64 if block is not None and block.dtype.itemsize == 8 else np.int32)
    row = size * dtype.itemsize
    begin, programs = at - first * dtype.itemsize, 1
    # In a user's barrier the flags of all programs are one tensor, so all rows are read. In the library's memory only
    # the row of this program is known.
    if block is not None:
        whole = begin - program * row
        if whole >= block.offset and whole + words[PROGRAMS] * row <= block.offset + block.size:
            begin, programs = whole, words[PROGRAMS]
    flags = mapping.snapshot(begin, programs * row).view(dtype).reshape(programs, size)
    program = program if programs > 1 else 0
    lead = flags[program] - np.full(size, words[WANTED], dtype)  # wraps, as epochs do
    arrived += [rank for rank in range(end, size) if lead[rank] >= 0]
    ranks = mapping.ranks if len(mapping.ranks) == size else range(size)
    own = mapping.rank if block is not None else None
    return explain(flags, program, words[WANTED], own, arrived, ranks)


def _queues(words: list[int]) -> str:
    """Who is behind in a collective, in words, by what each rank has posted (`iris.ccl.queue`)."""
    late = [rank for rank in range(words[RANKS]) if not _bit(words, rank)]
    found = locate(words[FLAG])
    if found is None:
        return f"Ranks {late} of its group were behind."
    mapping, _, at = found
    posts = mapping.snapshot(at, 8 * words[RANKS]).view(np.int64)
    late_ranks = [
        f"rank {mapping.ranks[rank]}, which has put in {posts[rank] >> 32} and taken {posts[rank] & 0xFFFFFFFF}"
        for rank in late
    ]
    return f"Behind: {'; '.join(late_ranks)}."


def _sources(words: list[int]) -> str:
    """Whose data are missing, in words."""
    late = [rank for rank in range(BARRIER_LANES) if _bit(words, rank)]
    found = locate(words[FLAG])
    if not late or found is None:
        return "its peers, or from other programs of its own"
    mapping = found[0]
    if late == [mapping.rank]:
        return "another program of the same kernel"
    there = [rank for column, rank in enumerate(mapping.ranks) if column != mapping.rank and column not in late]
    arrived = f"; those of {names(there)} have arrived" if there else ""
    return f"{names([mapping.ranks[rank] for rank in late])}{arrived}"


def _bit(words: list[int], rank: int) -> bool:
    return bool(words[SEEN] >> rank & 1)
