"""The queues between ranks: how blocks of any size, from anywhere, get from one rank's program to another's.

Program p of each rank has a queue to program p of every other: `SLOTS` slots of staging memory at the receiver. Each
rank signals each other how many blocks it has put into the queue to it, and taken out of the queue from it. Both counts
only ever rise and are one word of 64 bits, so that one release says both:

    posts[p, s]    at every rank: (blocks that s has put in for this rank, blocks that s has taken of this rank's)
    tail, head     what this rank has put in and taken out, for its own use

A sender may write block n (from 0) once n + 1 - SLOTS blocks are taken, and a receiver may read it once n + 1 are put
in. Both are waits for a count to be *reached*, so a count that is already further loses nothing, and none is ever
reset. Since counts live in device memory and belong to a pair, any sequence of collectives with any roots, sizes and
grids may follow each other on a queue, in a CUDA graph too: all that must agree is how many blocks the two ends of a
pair move, and these follow from the call's arguments.

The slots of a queue are where they are whatever a call uses of them: a rank that is ahead writes the next call's blocks
while a slow one still reads this call's, and counts guard a queue's own slots alone.

Programs work in rounds. In each a program sends what is next, takes what its peers sent `AHEAD` rounds before, and
posts its counts at the end; so the trip of a block, and of the fence after it, is hidden by the next ones.

Large results that lie on the symmetric heap need no slots, nor do those in other memory that all ranks reach, the
*regions* of a group (`iris.ccl.communicator`). The receiver sends each sender the place of its result, in a *place*: a
word of 64 bits with the region in bits 42 to 47 and the offset in it below, both plus one, and the count of such calls
in the upper 16 bits, or zero offset for "use the queue". Nobody overruns it: the next call's word comes after the
receiver has seen this call's data, which the sender wrote after it had read this call's word. Saying the place is also
the permission to write: the word is stored by a kernel that runs after everything earlier on the receiver's stream.
When all is written, the sender of an exchange sets ``done`` to its count of these calls, with release.
(`iris.ccl.two_shot` needs no ``done``: a sum's sender posts a count after it anyway.)

Inputs on the heap may be read where they are (`iris.ccl.pull`, `iris.ccl.broadcast`). Then all ranks of the group tell
each other where their input lies, with release, after everything earlier on their streams; and their output.
``exits[s]`` is the last of these calls that rank s has finished; a rank leaves when all have, so its input is read and
its output written. The own column counts the calls, as in a barrier (`iris.language.barrier`). In `iris.ccl.pull` no
program depends on which blocks another one has, so programs claim them (`claim_block`). How many are claimed is in the
own column of the first program's ``done``, which no peer sets.
"""

import triton.language as tl

from iris.failures.device_record import BARRIER_LANES
from iris.language.address import translate
from iris.language.barrier import lanes
from iris.language.jit import jit
from iris.language.ll import ll_recv_places, ll_send_place
from iris.language.ordering import store_after_sync

# Ranks that a block of lanes holds: the largest group.
MAX_RANKS = BARRIER_LANES
SLOTS = 4
# Above so many bytes it pays to ask where the result lies, which costs a hop, and to spare the way through the queue.
LONGEST_QUEUED = tl.constexpr(64 << 10)
# Rounds between sending a block and expecting it at the other end. A round sends two blocks at most (`two_shot`), so
# 2 * AHEAD + 2 slots are enough. More rounds ahead measured slower: blocks are smaller then, for the same memory.
AHEAD = tl.constexpr(1)

# A program's counts: rows of MAX_RANKS int32.
DONE, TAIL, HEAD, CALLS_TO, CALLS_FROM, EXITS, MESSAGES_TO, MESSAGES_FROM, WRITTEN = (
    tl.constexpr(i * MAX_RANKS) for i in range(9)
)
COUNTS = tl.constexpr(9 * MAX_RANKS)

# A program's words: rows of MAX_RANKS int64.
POSTS, PLACES, INPUTS, OUTPUTS, ASKED, _, TARGETS, _, SIZES = (tl.constexpr(i * MAX_RANKS) for i in range(9))
# SIZES has a row for each of so many messages that follow each other, ASKED and TARGETS for two (`iris.ccl.sizes`).
MESSAGES = 8
WORDS = tl.constexpr((8 + MESSAGES) * MAX_RANKS)

# Of a region, 4 TiB; and how many regions there may be.
REGION_BITS, WITHIN_REGION = tl.constexpr(42), tl.constexpr((1 << 42) - 1)
MOST_REGIONS = 64

NUM_SLOTS = tl.constexpr(SLOTS)
HIGH, LOW = tl.constexpr("high"), tl.constexpr("low")


def slots_bytes(programs: int, size: int, slot_bytes: int) -> int:
    """Bytes of all slots of the queues of ``programs`` programs of a group of ``size`` ranks."""
    return programs * size * SLOTS * slot_bytes if size > 1 else 0


def region_bytes(programs: int, size: int, slot_bytes: int) -> int:
    """Bytes of the queues: counts, words and slots."""
    return programs * (COUNTS.value * 4 + WORDS.value * 8) + slots_bytes(programs, size, slot_bytes)


@jit
def lane_value(values, rank):
    """The value of one lane."""
    return tl.sum(tl.where(lanes() == rank, values, 0), axis=0)


@jit
def among(first, last, rank):
    """Lanes of the ranks from ``first`` to before ``last``, without the caller."""
    peer = lanes()
    return (peer >= first) & (peer < last) & (peer != rank)


@jit
def blocks_of(n, size):
    """How many blocks of ``size`` have ``n`` elements, which an int32 may just hold; int32."""
    return tl.cast((tl.cast(n, tl.int64) + size - 1) // size, tl.int32)


@jit
def queue_address(ctx, slots, W: tl.constexpr, SLOT: tl.constexpr, to):
    """Where the caller's queues begin at each of the ranks ``to``; int64 lanes."""
    mine = slots + (tl.cast(tl.program_id(0), tl.int64) * W + ctx.cur_rank) * (NUM_SLOTS * SLOT)
    return tl.load(ctx.table + lanes(), mask=to, other=0) + (tl.cast(mine, tl.int64) - ctx.base)


@jit
def pointer_at(like, address):
    """``address`` as a pointer of the type and alignment of ``like``; a multiple of 16 bytes is between them."""
    return translate(like, tl.cast(like, tl.int64), address)


@jit
def place_of(ctx, queues, tensor, length, W: tl.constexpr):
    """Where a tensor lies in which region, as one number, and whether it lies in any."""
    offset = tl.cast(tensor, tl.int64) - tl.load(queues.heap_table + ctx.cur_rank)
    # Aligned as the peers' pointers assume; what is not takes the queue.
    direct = (offset >= 0) & (offset + length <= tl.load(queues.heap_table + W)) & (offset % 16 == 0)
    for region in range(1, queues.regions):
        row = queues.heap_table + region * (W + 1)
        within = tl.cast(tensor, tl.int64) - tl.load(row + ctx.cur_rank)
        here = (within >= 0) & (within + length <= tl.load(row + W)) & (within % 16 == 0)
        offset = tl.where(here, (tl.cast(region, tl.int64) << REGION_BITS) + within, offset)
        direct = direct | here
    return offset, direct


@jit
def address_at(ctx, queues, place, ranks, W: tl.constexpr):
    """The addresses, in this rank's space, of what lies at a `place_of` the ``ranks``, plus one; 0 for a 0. Lanes."""
    if queues.regions == 1:
        base = tl.load(queues.heap_table + lanes(), mask=ranks, other=0)
    else:
        row = queues.heap_table + ((place - 1) >> REGION_BITS) * (W + 1)
        base = tl.load(row + lanes(), mask=ranks & (place > 0), other=0)
        place = tl.where(place > 0, ((place - 1) & WITHIN_REGION) + 1, 0)
    return tl.where(ranks & (place > 0), base + place - 1, 0)


@jit
def permit(ctx, queues, words, output, length, calls, ranks, W: tl.constexpr):
    """Send ``ranks`` the place that they may write to; returns whether that is on the heap, else they may not.

    What used the memory before was an earlier kernel, which is over: its accesses have been performed in this GPU's L2
    cache, to which the peers' stores come only after they have received this word. That is how the hardware works; the
    memory model of PTX would want a release here.
    """
    offset, direct = place_of(ctx, queues, output, length, W=W)
    theirs = translate(words + ctx.cur_rank, ctx.base, tl.load(ctx.table + lanes(), mask=ranks, other=0))
    ll_send_place(theirs, tl.where(direct, offset + 1, 0), calls, ranks)
    return direct


@jit
def advertise_input(ctx, queues, words, tensor, length, calls, others, W: tl.constexpr):
    """Send all ranks the place of a tensor that they may read; returns whether that is on the heap."""
    offset, direct = place_of(ctx, queues, tensor, length, W=W)
    word = tl.where(direct, offset + 1, 0) | (tl.cast(calls & 0xFFFF, tl.int64) << 48)
    nothing = tl.cast(lanes() * 0, tl.int64)
    ctx._signal_ranks(words + ctx.cur_rank, word + nothing, lanes(), others)
    return direct


@jit
def resolve_places(ctx, queues, words, calls, others, W: tl.constexpr, ACQUIRES: tl.constexpr):
    """The addresses that all ranks sent by `advertise_input` or `permit`; 0 where a tensor is not on the heap.

    ``ACQUIRES``: as of `ll_recv_places`; for inputs, which were sent with release.
    """
    offset = ll_recv_places(words + lanes(), calls + lanes() * 0, others, ctx._record(), ACQUIRES=ACQUIRES)
    return address_at(ctx, queues, offset, ranks=others, W=W)


@jit
def advertise(ctx, queues, row, words, output, length, W: tl.constexpr, sources):
    """Send the ranks ``sources`` the place for their data; returns the count of such calls, and if it is direct."""
    calls = tl.load(row + CALLS_FROM + lanes(), mask=sources, other=0) + 1
    direct = permit(ctx, queues, words + PLACES, output, length=length, calls=calls, ranks=sources, W=W)
    store_after_sync(row + CALLS_FROM + lanes(), calls, sources)
    return calls, direct


@jit
def resolve_output(ctx, queues, row, words, to, W: tl.constexpr):
    """Where the ranks ``to`` want their data: the count of such calls, and an address each, 0 for the queue."""
    calls = tl.load(row + CALLS_TO + lanes(), mask=to, other=0) + 1
    offset = ll_recv_places(words + PLACES + lanes(), calls, to, ctx._record())
    store_after_sync(row + CALLS_TO + lanes(), calls, to)
    return calls, address_at(ctx, queues, offset, ranks=to, W=W)


@jit
def next_slot(begin, sent, to, SLOT: tl.constexpr):
    """The slot for the next block to rank ``to``, in the caller's queue there, which begins at ``begin``."""
    return begin + (lane_value(sent, to) & (NUM_SLOTS - 1)) * SLOT


@jit
def slot_of(p, s, got, W: tl.constexpr):
    """Which slot of this rank holds the next block from rank ``s``."""
    return tl.cast((p * W + s) * NUM_SLOTS + (lane_value(got, s) & (NUM_SLOTS - 1)), tl.int64)


@jit
def store_to_peer(ctx, ptrs, values, rank, mask, asked=None):
    """Store to ``ptrs``, in the memory of ``rank``, as tracing records it; where not ``asked``, it records nothing."""
    event = ctx.tracing.begin_move("store", ptrs, rank, mask, asked=asked)
    tl.store(ptrs, values, mask=mask)
    ctx.tracing.record_event_end(event)


@jit
def load_counters(row, peers):
    """The program's counts of blocks sent to, and got from, each of ``peers``."""
    sent = tl.load(row + TAIL + lanes(), mask=peers, other=0)
    got = tl.load(row + HEAD + lanes(), mask=peers, other=0)
    return sent, got


@jit
def store_counters(row, sent, to, got, sources):
    """Keep the counts for the next call."""
    store_after_sync(row + TAIL + lanes(), sent, to)
    store_after_sync(row + HEAD + lanes(), got, sources)


@jit
def wait_credits(ctx, words, sent, to, W: tl.constexpr):
    """Wait for room for another block in the queues to the ranks ``to``."""
    ctx._wait_ranks(words + POSTS + lanes(), sent + 1 - NUM_SLOTS, to, 0, num_ranks=W, half=LOW)


@jit
def wait_blocks(ctx, words, got, sources, W: tl.constexpr):
    """Wait for the next block in the queues from the ranks ``sources``."""
    ctx._wait_ranks(words + POSTS + lanes(), got + 1, sources, 0, num_ranks=W, half=HIGH)


@jit
def wait_consumed(ctx, words, sent, to, W: tl.constexpr):
    """Wait until the ranks ``to`` have taken all that they were sent."""
    ctx._wait_ranks(words + POSTS + lanes(), sent, to, 0, num_ranks=W, half=LOW)


@jit
def publish_counters(ctx, words, sent, got, peers):
    """Publish to ``peers`` what was put in and taken out: after all writes to their slots, and reads of the own."""
    word = (tl.cast(sent, tl.int64) << 32) | (tl.cast(got, tl.int64) & 0xFFFFFFFF)
    ctx._signal_ranks(words + POSTS + ctx.cur_rank, word, lanes(), peers)


@jit
def finish(ctx, flags, calls_to, to, calls_from, sources, W: tl.constexpr):
    """Signal "all written" to the ranks ``to`` that were written directly, and wait for it from ``sources``.

    ``flags``: the row `DONE`, or `WRITTEN` of messages whose sizes are compared.
    """
    ctx._signal_ranks(flags + ctx.cur_rank, calls_to, lanes(), to)
    ctx._wait_ranks(flags + lanes(), calls_from, sources, 0, num_ranks=W)


@jit
def claim_block(ctx, queues, blocks):
    """The next block of this call that no program of this rank has; ``blocks`` or more if none is left.

    A program claims until none is left, and not again. So the last number that a call claims is blocks + programs - 1.
    Whoever claims it sets the count back for the next call, a kernel that runs after this one.
    """
    count = queues.counts + DONE + ctx.cur_rank
    claimed = tl.atomic_add(count, 1, sem="relaxed", scope="gpu")
    if claimed == blocks + tl.num_programs(0) - 1:
        tl.atomic_xchg(count, 0, sem="relaxed", scope="gpu")
    return claimed


@jit
def exit_barrier(ctx, row, calls, others, W: tl.constexpr):
    """The end of a call that accesses peers' tensors in place: all have read, and written, when anyone goes on."""
    ctx._signal_ranks(row + EXITS + ctx.cur_rank, calls + lanes() * 0, lanes(), others)
    store_after_sync(row + EXITS + ctx.cur_rank, calls)
    ctx._wait_ranks(row + EXITS + lanes(), calls + lanes() * 0, others, 0, num_ranks=W)
