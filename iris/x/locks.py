"""Locks: by them ranks signal each other that a tile lies in ``src``, and that it has been read.

They are counters of signals. W is the number of ranks.

**The array** has one lock for each tile, int32 or int64, on the heap, zeros at first. Each ``src`` has an array of its
own. Locks are never reset, so calls may follow each other without a barrier between them, and in graphs. Zeroing them
between calls, after a barrier, does no harm.

**What a call adds.** Each call raises a tile's lock by `PERIOD` on each rank, in units of `SIGNAL`:

* `all_reduce_one_shot` and `reduce_scatter`. Every rank signals all ranks twice. Its *first* signal says that its tile
  lies in ``src``, its *last* one that it has read the others' tiles. Each adds 1, but for the last one of rank 0: that
  adds what is missing to `PERIOD`.
* `all_reduce_two_shot`. One rank adds the tile up. Each of the others adds 1 to that rank's lock when its own tile lies
  in ``src``: its first signal. When the sum lies in their ``dst``, that rank adds `PERIOD` to their locks, and what is
  missing to `PERIOD` to its own.

Every rank adds to locks with release. Only a lock's own rank waits for it, with acquire.

**Where a call starts.** Let k calls be over on this rank. Then k PERIOD is the multiple of PERIOD at or below
``lock + PERIOD - W``, all counted in signals:

1. The last of the k calls has waited until the lock was (k - 1) PERIOD + W; or k PERIOD in two-shot, where the rank
   that adds the tile up raises its own lock to that. And locks do not fall. So the lock is at k PERIOD - (PERIOD - W)
   or above.
2. Of call k + 1 a first signal of each peer may be here and nothing else, as nobody gets further without this rank's.
   So the lock is at k PERIOD + W - 1 or below.

**Why a rank may store into ``src``** once its lock has reached k PERIOD:

1. Either all signals of k calls are here. Then everybody has read what lay in ``src``.
2. Or some last signals are still on their way, and as many first signals of call k + 1 are here instead. The sender of
   such a first signal had found its own lock at k PERIOD. So it had acquired the last signals of all ranks, or first
   signals to which the same applies, and its own signal releases what it had acquired.

The same argument holds where a rank waits for first signals and has last ones instead. Comparisons wrap, and PERIOD
divides 2^32, so counts may overflow.

**Locks that somebody else writes.** A caller that sets its lock to 1 takes away the signals that have come already.
That must not end in wrong sums, so a lock shows who has written it:

1. Signals are multiples of `SIGNAL`, 2^16. The lower 16 bits stay 0, whatever number of signals arrives before or after
   a caller's store. Of the other bits a call can begin only with what its protocol leaves there: less than 2 W signals
   above or below a multiple of `PERIOD`.
2. A rank looks at its lock as the call begins, in the atomic operation that it needs anyway. If it finds anything else
   there, it sends no signal of this call. It sets `GIVEN_UP` in the lock of each rank, and reports its own.
3. A wait ends when its lock has what it waits for, or else when one of its lower 16 bits is set: this rank leaves the
   tile out, asks the peers' locks which of them has been written, and reports that.

So nobody waits for ever for a rank that has left a tile out. `GIVEN_UP` stays, and later calls for the tile report it
too, until the locks are zeroed after a barrier. Calls whose locks are in order send nothing more for this.
"""

import triton
import triton.language as tl

from iris.language.address import in_simulator
from iris.language.barrier import LANES, lanes
from iris.language.failures import kind_code, write_record
from iris.x.tile import columns_of, rows_of

SIGNAL = tl.constexpr(1 << 16)

# More than two signals of each of 2047 ranks; a power of two.
PERIOD = tl.constexpr(SIGNAL.value << 12)

# In the lower 16 bits: a peer has found its own lock written.
GIVEN_UP = tl.constexpr(1 << 15)


@triton.constexpr_function
def raise_foreign_value(lock, word, owner, caller):
    """In the simulator: raise that a lock of rank ``owner`` holds what nobody of `iris.x` has put there."""
    from iris.errors import ForeignLockValueError
    from iris.heap.mapping import describe_address

    lock, word, owner, caller = (
        value.handle.data.item() if isinstance(value, tl.tensor) else value for value in (lock, word, owner, caller)
    )
    raise ForeignLockValueError(caller, owner, describe_address(lock), word)


@triton.jit
def report(lock, word, owner, ctx):
    """Report to the host that rank ``owner``'s copy of ``lock`` holds ``word``, which `iris.x` has not put there."""
    if in_simulator():
        raise_foreign_value(lock, word, owner, ctx.cur_rank)
    else:
        write_record(
            ctx._record(), lock, wanted=owner, seen=word, kind=kind_code("foreign"), first=0, num_ranks=ctx.num_ranks
        )


@triton.jit
def written(word, ctx):
    """Whether somebody else has written a lock that holds this."""
    around = 2 * SIGNAL * ctx.num_ranks
    return ((word & (GIVEN_UP - 1)) != 0) | (((word + around) & (PERIOD - 1)) >= 2 * around)


@triton.jit
def give_up(lock, word, ctx):
    """Leave the tile out on all ranks, as this rank's lock holds ``word``; report whose lock has been written."""
    owner = ctx.cur_rank
    found = word
    if written(word, ctx):
        for distance in range(1, ctx.num_ranks + 1):
            ctx.atomic_or(lock, GIVEN_UP, (ctx.cur_rank + distance) % ctx.num_ranks, sem="relaxed")
    else:
        for peer in range(ctx.num_ranks):
            there = ctx.atomic_add(lock, 0, peer, sem="relaxed")
            if written(there, ctx):
                owner = peer
                found = there & ~GIVEN_UP
    report(lock, found, owner, ctx)


@triton.jit
def begin(tile, src, lock, ctx):
    """Put the tile into ``src``, if it brings its values, once nobody reads what lay there.

    Returns the count to go on from, and whether to: not where the tile is left out.
    """
    now = ctx.atomic_add(lock, 0, ctx.cur_rank, sem="relaxed")
    start = (now + PERIOD - SIGNAL * ctx.num_ranks) & -PERIOD
    good = ((now & (SIGNAL - 1)) == 0) & (written(now, ctx) == 0)
    if good:
        good = arrived(lock, start, ctx)
    else:
        give_up(lock, now, ctx)
    if tile.HOLDS_DATA:
        # Under no condition but the mask: Triton 3.6 for Blackwell cannot compile the use of a product under another.
        rows, columns = rows_of(tile), columns_of(tile)
        data = tile.data.to(src.ptr.dtype.element_ty)
        tl.store(src.at(rows, columns), data, mask=good & (rows < src.M) & (columns < src.N))
    return start, good


@triton.jit
def arrived(lock, wanted, ctx):
    """Wait until this rank's lock has reached ``wanted``; False if the tile is to be left out instead."""
    seen = ctx._wait_unless(lock, wanted, SIGNAL - 1)
    good = seen - wanted >= 0
    if (good == 0) & ((seen & (SIGNAL - 1)) != 0):
        give_up(lock, seen, ctx)
    return good


@triton.jit
def signal_all(lock, value, ctx):
    """Add to every rank's lock, after everything that the block did."""
    ctx._check(lock, None, ctx.cur_rank)
    for first in range(0, ctx.num_ranks, LANES):
        to = first + lanes()
        values = tl.zeros_like(to).to(lock.dtype.element_ty) + value
        ctx._signal_ranks(lock, values, to, here=to < ctx.num_ranks, op="add")


@triton.jit
def finish(tile, lock, start, ctx):
    """Signal all ranks that this one has read their tiles; a `TileView` waits until its own has been read by all."""
    if ctx.cur_rank == 0:
        signal_all(lock, PERIOD - SIGNAL * (2 * ctx.num_ranks - 1), ctx)
    else:
        signal_all(lock, SIGNAL, ctx)
    if not tile.HOLDS_DATA:
        arrived(lock, start + PERIOD, ctx)
