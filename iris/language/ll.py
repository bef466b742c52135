"""LL messages: each word of 8 bytes is 4 bytes of data and 4 of flag, as in NCCL's protocol of that name.

They take twice the bytes, and one trip over the link. A flag of its own would cost a fence between data and flag, and
the reader a second trip, from the flag to the data. The flag in each word is the number of a round, the *epoch*. The
reader waits for the epoch that it expects, and so tells a word of this round from one that an earlier round has left in
the same memory.

Why this needs no fence: a word is written by one access of 8 bytes, naturally aligned, and is never seen in part. (PTX
ISA, "Memory Consistency Model", promises that for strong accesses, of which a vector is one for each element. Here the
readers' loads are strong, and the stores are plain ones of Triton. That a plain aligned store of 8 bytes arrives whole
is what the hardware does; NCCL's protocol relies on the like.) The word depends on no other memory: the reader takes
the data from the very load that showed the flag. What has to be ordered is the reuse of a word, and each user argues
that: see `iris.ccl.one_hop`.

A *place* (48 bits that say where some memory is) is sent in the same way, with 16 bits of a count as its flag.
"""

import triton.language as tl

from iris.language.address import in_simulator
from iris.language.barrier import LANES, lanes
from iris.language.failures import WAIT_LIMIT_NS, exceeded, kind_code, untimed
from iris.language.fences import block_barrier
from iris.language.jit import jit
from iris.language.note import note
from iris.language.ordering import give_up, load_relaxed, load_relaxed_uniform, poll
from iris.language.target import on_amd

# Beyond every address.
HIGHEST = tl.constexpr((1 << 63) - 1)


@jit
def write_through(ptrs, values, mask):
    """Store to a peer's memory at once, and not when the kernel ends."""
    if in_simulator():
        note("message")
    # On AMD a plain store may stay in the writer's L2 until the kernel ends.
    if on_amd():
        tl.store(ptrs, values, mask=mask, cache_modifier=".wt")
    else:
        tl.store(ptrs, values, mask=mask)


@jit
def timed_out(ptrs, without, since, wanted, source, record):
    """`exceeded` for a wait for data. If the limit is exceeded, records that ``without`` marks the missing ``ptrs``.

    ``source``: the rank that the data come from, or a block with the rank of each of ``ptrs``; -1 where it is not
    known.
    """
    over, since = exceeded(record, since)
    if over:
        late = tl.cast(0, tl.int64)
        for rank in range(0, LANES):
            missing = tl.max(tl.cast(without & (rank == source), tl.int32), axis=0)
            late = late | (tl.cast(missing, tl.int64) << rank)
        record_missing(ptrs, without, wanted=wanted, late=late, record=record)
    return over, since


@jit
def record_missing(ptrs, without, wanted, late, record):
    """Record the first of ``ptrs`` that is marked in ``without``, and ``late``, a bit for each rank that is late."""
    first = tl.min(tl.where(without, tl.cast(ptrs, tl.int64), HIGHEST), axis=0)
    give_up(record, first, wanted=wanted, seen=late, kind=kind_code("data"), first=0, num_ranks=0)


@jit
def ll_send(ptrs, words, stamp, mask):
    """Store int32 ``words``, each with the int32 ``stamp``, to the int64 ``ptrs``, a peer's."""
    low = tl.cast(words, tl.int64) & 0xFFFFFFFF
    write_through(ptrs, low | (tl.cast(stamp, tl.int64) << 32), mask)


@jit
def ll_recv(ptrs, stamp, mask, source, record):
    """Wait until all of the caller's own ``ptrs`` carry ``stamp``; returns the int32 words.

    There must be a word for each thread. If two threads polled the same word, the test might take one thread's value,
    and the result the other's, which is older.
    """
    if WAIT_LIMIT_NS > 0:
        since = untimed()
    words = load_relaxed(ptrs, mask)
    missing = tl.max(tl.cast(mask & (tl.cast(words >> 32, tl.int32) != stamp), tl.int32), axis=0)
    while missing > 0:
        words = load_relaxed(ptrs, mask)
        missing = tl.max(tl.cast(mask & (tl.cast(words >> 32, tl.int32) != stamp), tl.int32), axis=0)
        if WAIT_LIMIT_NS > 0:
            if missing > 0:
                without = mask & (tl.cast(words >> 32, tl.int32) != stamp)
                over, since = timed_out(ptrs, without, since, wanted=stamp, source=source, record=record)
                if over:
                    missing = missing * 0
    return tl.cast(words, tl.int32)


@jit
def ll_send_place(ptrs, place, count, mask):
    """Store ``place``, int64 below 2^48, with the low 16 bits of ``count`` as its flag, to the int64 ``ptrs``.

    By an exchange, since `ll_recv_places` polls by read-modify-writes, which are atomic among their own kind (PTX
    ISA, "Memory Consistency Model": atomicity).
    """
    word = place | (tl.cast(count & 0xFFFF, tl.int64) << 48)
    if in_simulator():
        note("message")
    tl.atomic_xchg(ptrs, word, mask=mask, sem="relaxed", scope="sys")


@jit
def unplaced(words, counts, mask):
    """Which of the words do not carry the low 16 bits of their ``counts`` yet."""
    stamps = tl.cast(words >> 48, tl.int32) & 0xFFFF
    return mask & (stamps != (counts & 0xFFFF))


@jit
def load_places(ptrs, mask, ACQUIRES: tl.constexpr):
    """The words as they are now."""
    if ACQUIRES:
        return poll(ptrs, mask)
    else:
        return load_relaxed_uniform(ptrs, mask)


@jit
def ll_recv_places(ptrs, counts, mask, record, ACQUIRES: tl.constexpr = False):
    """Wait until all of the caller's own ``ptrs``, one a rank, carry their ``counts``; returns the places.

    ``ACQUIRES``: where the places were sent with release, so that what their senders had written before is visible. One
    warp waits and the others meet it, which takes less time than a fence of all threads.
    """
    if WAIT_LIMIT_NS > 0:
        since = untimed()
    words = load_places(ptrs, mask, ACQUIRES=ACQUIRES)
    missing = tl.max(tl.cast(unplaced(words, counts, mask), tl.int32), axis=0)
    while missing > 0:
        words = load_places(ptrs, mask, ACQUIRES=ACQUIRES)
        missing = tl.max(tl.cast(unplaced(words, counts, mask), tl.int32), axis=0)
        if WAIT_LIMIT_NS > 0:
            if missing > 0:
                late = unplaced(words, counts, mask)
                over, since = timed_out(ptrs, late, since, wanted=0, source=lanes(), record=record)
                if over:
                    missing = missing * 0
    if ACQUIRES:
        block_barrier()
    return words & 0xFFFFFFFFFFFF
