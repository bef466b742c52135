"""Guards against accesses to ranks of other hosts, whose memory a kernel cannot address.

In a context that spans hosts, the table of heap bases has 0 for ranks of other hosts. On a GPU such a table has a type
of its own (`iris.language.context_tensor.table_type`). Kernels that are compiled for this type guard each access to a
peer: elements that would go to another host are masked out, and an error is written into the device record, which the
host's next barrier raises as `RemoteRankError`. With any other table none of that is in the generated code.
"""

import triton
import triton.language as tl

from iris.language.address import check_rank_type, in_simulator, stored
from iris.language.failures import NOWHERE, kind_code, largest, write_record
from iris.language.jit import jit


@triton.constexpr_function
def check_local(ranks, mask, base):
    """In the simulator: raise if one of these ranks, under ``mask``, is on another host than the heap at ``base``."""
    # Imported here: Triton follows the global names of a constexpr_function, and does not know these.
    from iris.heap import reach

    reach.check_local(*stored(ranks, mask, base))


@triton.constexpr_function
def check_rank(ranks, base):
    """In the simulator: raise unless the heap at ``base`` has these ranks."""
    from iris.heap import reach

    reach.check_rank(*stored(ranks, base))


@jit
def is_local(self, rank):
    """Whether ``rank`` is on the caller's host, so that loads, stores and atomics can access its heap.

    A scalar or a block, as ``rank`` is. It costs one 8-byte load from a table in the caller's memory.
    """
    if in_simulator():
        check_rank(rank, self.base)
    # The table of heap bases has 0 for ranks that have no address here.
    return tl.load(self.table + rank) != 0


@triton.constexpr_function
def guards(table):
    """Whether accesses with this table of heap bases are guarded."""
    check_table(table, "heap_bases", "ctx.get_heap_bases()")
    return table.type.element_ty == tl.uint64


@triton.constexpr_function
def check_table(table, name, source):
    """Raise unless this has the type of a context tensor or a table of heap bases. ``name``: what the argument is."""
    from iris.errors import InvalidContextError

    kind = table.type if isinstance(table, tl.tensor) else type(table).__name__
    if getattr(kind, "element_ty", None) not in (tl.int64, tl.uint64):
        raise InvalidContextError(f"A kernel passed {name} of the type {kind}: it is what {source} gives.")


@jit
def base_of(table, rank):
    """The address, for the caller, at which the heap of ``rank`` begins. ``rank`` may be a block."""
    check_rank_type(rank)
    return tl.cast(tl.load(table + rank), tl.int64)


@jit
def guarded(ptr, rank, mask, table, record):
    """``mask`` without the elements of ``ptr`` whose ``rank`` is on another host. One such rank is recorded."""
    # The result has the shape of the pointer: Gluon's atomics take no scalar mask for a block.
    _, here = tl.broadcast(ptr, tl.load(table + rank) != 0)
    away = here == 0
    if mask is not None:
        here = here & mask
        away = away & mask
    # Plus 1, since rank 0 may be the remote one, and 0 means that there is none.
    remote = largest(tl.where(away, tl.cast(rank, tl.int64) + 1, 0))
    if remote != 0:
        note_remote(remote - 1, record)
    return here


@jit
def elsewhere(target, here, record):
    """``target``; where not ``here``, a word that nobody reads. For operations that take no mask."""
    nowhere = tl.cast(record + NOWHERE, tl.int64)
    return tl.cast(tl.where(here, tl.cast(target, tl.int64), nowhere), target.dtype)


@jit
def note_all_remote(table, num_ranks, record):
    """Record the error that a call is for all ranks though some are on other hosts. It names the last one of these."""
    remote = tl.cast(num_ranks, tl.int64) * 0
    for rank in range(num_ranks):
        if tl.load(table + rank) == 0:
            remote = tl.cast(rank, tl.int64)
    note_remote(remote, record)


@jit
def note_remote(rank, record):
    write_record(record, 0, wanted=rank, seen=0, kind=kind_code("remote"), first=0, num_ranks=0)
