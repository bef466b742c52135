"""The barrier of all ranks, and what it is made of: signals to many ranks at a time, and waits for flags of many.

A block has a lane for each rank. The rules of memory order are those of `iris.language.ordering`, which has signals and
waits for one flag.
"""

import triton
import triton.language as tl
from triton.experimental.gluon import language as gl

from iris.failures import device_record
from iris.language.address import in_simulator, stored, translate
from iris.language.failures import WAIT_LIMIT_NS, exceeded, kind_code, linear_program_id, untimed
from iris.language.fences import block_barrier, cta_sync
from iris.language.jit import gluon_version_of, jit
from iris.language.locality import check_local
from iris.language.note import note
from iris.language.ordering import SET, give_up, one_of, poll
from iris.language.target import threads_per_warp

# A flag is compared as a whole, or it holds two counts, of which the "high" or the "low" half is compared.
WHOLE = tl.constexpr("whole")

# Flags are handled by so many lanes at once: a warp. All releases of a warp share one system fence; a loop over single
# releases would pay for one each.
LANES = tl.constexpr(device_record.BARRIER_LANES)


@triton.constexpr_function
def meeting(half):
    """The kind that a failed wait for such flags is recorded as, of `iris.failures.device_record.KINDS`."""
    return "barrier" if half == "whole" else "queue"


@triton.constexpr_function
def check_row(flags_ptr, row, num_ranks, base):
    """In the simulator: raise unless the tensor at ``flags_ptr`` has this program's ``row`` of flags."""
    # Imported here: Triton follows the global names of a constexpr_function, and does not know these.
    from iris.heap import reach

    reach.check_row(*stored(flags_ptr, row, num_ranks, base), flags_ptr.dtype.element_ty.primitive_bitwidth // 8)


@triton.constexpr_function
def warp_layout(num_warps):
    """One element for each of `LANES` lanes. Further warps, and the upper half of an AMD wave, hold copies."""
    return gl.BlockedLayout([1], [threads_per_warp()], [num_warps], [0])


@triton.jit
def lanes():
    return tl.arange(0, LANES)


@gluon_version_of(lanes)
def _gluon_lanes():
    return gl.arange(0, LANES, layout=warp_layout(gl.num_warps()))


@jit
def count(flags, here, half: tl.constexpr):
    """The flags, or the "high" or "low" 32 bits of flags that hold two counts."""
    if half == "high":
        return tl.cast(poll(flags, here) >> 32, tl.int32)
    elif half == "low":
        return tl.cast(poll(flags, here), tl.int32)
    else:
        return poll(flags, here)


@jit
def behind(flags, wanted, here, half: tl.constexpr):
    """By how much the slowest of these flags is behind its ``wanted`` value; 0 or less if none is behind."""
    # A difference that wraps, so that a count that overflows is still past the one before.
    return tl.max(tl.where(here, wanted - count(flags, here, half), 0), axis=0)


@jit
def arrivals(flags, wanted, here, half: tl.constexpr):
    """A bit for each of `LANES` flags: whether it has reached its ``wanted`` value."""
    there = (here == 0) | (wanted - count(flags, here, half) <= 0)
    return tl.sum(tl.cast(there, tl.int64) << lanes(), axis=0)


@jit
def signal_ranks(flag_ptr, values, peers, here, table, base, op: tl.constexpr = SET):
    """Publish everything that the block did so far: ``values`` into the copies of ``flag_ptr`` of ``peers``.

    ``op``: "set" or "add". ``values``, ``peers`` and the mask ``here`` are blocks of `lanes`: one fence serves all
    of these releases. Returns what the flags hold after them.
    """
    if in_simulator():
        check_local(peers, here, base)
    cta_sync()
    flags = translate(flag_ptr, base, tl.load(table + peers, mask=here, other=0))
    if op == "set":
        tl.atomic_xchg(flags, values, mask=here, sem="release", scope="sys")
        return values
    else:
        return tl.atomic_add(flags, values, mask=here, sem="release", scope="sys") + values


@jit
def wait_ranks(flag_ptrs, wanted, here, first, num_ranks, record, half: tl.constexpr = WHOLE):
    """Wait until each of the caller's own flags, where ``here``, has reached ``wanted`` (wrapping, like epochs).

    Blocks of `lanes`, for the ranks from ``first`` on; what was published with the flags is visible afterwards.
    ``half``: "high" or "low", where flags of 64 bits hold two counts.
    """
    missing = behind(flag_ptrs, wanted, here, half)
    if WAIT_LIMIT_NS == 0:
        while missing > 0:
            missing = behind(flag_ptrs, wanted, here, half)
    else:
        since = untimed()
        while missing > 0:
            missing = behind(flag_ptrs, wanted, here, half)
            if missing > 0:
                over, since = exceeded(record, since)
                if over:
                    there = arrivals(flag_ptrs, wanted, here, half)
                    # The flags of one barrier all await one value; those of a queue may not, so: the largest.
                    most = tl.max(tl.where(here, wanted, 0), axis=0)
                    row = tl.min(tl.cast(flag_ptrs, tl.int64), axis=0)
                    give_up(
                        record,
                        row,
                        wanted=most,
                        seen=there,
                        kind=kind_code(meeting(half)),
                        first=first,
                        num_ranks=num_ranks,
                    )
                    missing = missing * 0
    block_barrier()


@jit
def barrier(flags_ptr, epoch, rank, num_ranks, table, base, record):
    """Program p of every rank meets program p of every other; what was written before is visible after it.

    ``flags_ptr``: int32 or int64, symmetric, ``[programs, num_ranks]``, zeros at first. ``flags[p, r]`` is the last
    epoch in which rank r's program p arrived. Rank r alone writes it, into every rank's copy; each rank reads its
    own copy of the whole row. The column of a rank in its own copy is where it keeps its own epoch.

    Why a flag can be reused in the next epoch: r announces e + 1 only after the barrier of e, hence after every
    rank announced e, but maybe before a slow rank has *seen* r's e. That rank waits for e *or later*, so it loses
    nothing; and r cannot reach e + 2 before the slow rank has announced e + 1. Flags never need resetting.

    Returns the epoch. Over the link: one flag to each peer, in one step.
    """
    tl.static_assert(
        one_of(flags_ptr.dtype.element_ty, tl.int32, tl.int64), "the flags of a barrier must be int32 or int64"
    )
    row = flags_ptr + tl.cast(linear_program_id(), tl.int64) * num_ranks
    if in_simulator():
        check_row(flags_ptr, row, num_ranks, base)
    if epoch is None:
        # An atomic: a second barrier in the same kernel must not find the first one's line in the L1.
        reached = tl.atomic_add(row + rank, tl.cast(0, flags_ptr.dtype.element_ty), sem="relaxed", scope="gpu") + 1
    else:
        reached = tl.cast(epoch, flags_ptr.dtype.element_ty)
    for first in range(0, num_ranks, LANES):
        peer = first + lanes()
        # Releases everything that the block did, to peers and to this rank's later epochs alike.
        signal_ranks(
            flag_ptr=row + rank,
            values=reached + tl.zeros_like(peer),
            peers=peer,
            here=peer < num_ranks,
            table=table,
            base=base,
        )
    if in_simulator():
        note("waits_for_ranks", reached, num_ranks)
    for first in range(0, num_ranks, LANES):
        peer = first + lanes()
        wait_ranks(
            flag_ptrs=row + peer,
            wanted=reached + tl.zeros_like(peer),
            here=peer < num_ranks,
            first=first,
            num_ranks=num_ranks,
            record=record,
        )
    if in_simulator():
        note("waited")
    return reached
