"""All-reduce around a ring: each rank talks to two neighbours alone, as links that join ranks in pairs like it.

A program's work is W chunks. First the chunks' sums go round: a rank adds its own elements to what comes from the left,
and passes that on to the right. After W - 1 steps each rank holds one finished chunk, and these go round in the same
way. Over the link: 2 (W - 1) / W times the bytes, in 2 (W - 1) steps, the first half in the accumulator's type, so that
a sum is rounded once: three times (W - 1) / W of a float16 input in all.

Programs belong to rings in turn, and odd rings go the other way round, so that both directions of a link are busy. The
ranks add to a chunk in the order of the ring, from the rank that has its number on. All ranks get the same bits, in
every run. But the order depends on an element's chunk, and so on the size of the call.

Blocks pass through the queues of `iris.ccl.queue`. A rank posts with its block for the right neighbour that it has
taken the last one of the left, so no slot is written before it was read. Nobody waits in a circle: whoever is furthest
behind finds the block that it waits for, since its left neighbour sent that before waiting itself, and room, since its
right neighbour has taken all but the last of the blocks before.
"""

import triton.language as tl

from iris.ccl.call import Algorithm, Call
from iris.ccl.combine import accumulator, combine, finalize, scaled
from iris.ccl.communicator import Launch
from iris.ccl.kernel_launch import kernel_launch
from iris.ccl.queue import (
    COUNTS,
    NUM_SLOTS,
    WORDS,
    blocks_of,
    lane_value,
    load_counters,
    next_slot,
    pointer_at,
    publish_counters,
    queue_address,
    store_counters,
    store_to_peer,
    wait_blocks,
    wait_credits,
)
from iris.ccl.reduction import accumulator_dtype
from iris.errors import InvalidConfigError
from iris.language.barrier import lanes
from iris.language.context import DeviceContext
from iris.language.dependent_launch import gdc_wait
from iris.language.flat import flat
from iris.language.jit import jit


@jit
def here(slots, got, left, W: tl.constexpr, SLOT: tl.constexpr):
    """The slot of this rank that holds the next block of the left neighbour."""
    queue_number = tl.cast(tl.program_id(0), tl.int64) * W + left
    return slots + (queue_number * NUM_SLOTS + (lane_value(got, left) & (NUM_SLOTS - 1))) * SLOT


@jit
def ring(
    queues,
    input,
    output,
    factors,
    n,
    rings,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOT: tl.constexpr,
    OP: tl.constexpr,
    STRIDING: tl.constexpr,
):
    """Slots of the accumulator's type. `STRIDING`: a program's chunks lie apart, else side by side."""
    gdc_wait()
    ctx = DeviceContext.initialize(queues.context, num_ranks=W)
    rank = ctx.cur_rank
    p = tl.program_id(0)
    programs = tl.num_programs(0)
    element: tl.constexpr = input.dtype.element_ty
    ACC: tl.constexpr = accumulator(element)
    slots = queues.slots
    row, own_words = queues.counts + p * COUNTS, queues.words + p * WORDS
    forward = tl.where(p % rings % 2 == 0, 1, W - 1)
    right = (rank + forward) % W
    left = (rank + W - forward) % W
    to, source = lanes() == right, lanes() == left
    # Both counts of both neighbours, since they are posted together.
    neighbours = to | source
    sent, got = load_counters(row, neighbours)
    begins = queue_address(ctx, slots, W, SLOT, to=to)

    i = flat(BLOCK, element)
    turns = blocks_of(n, W * BLOCK)
    first, stride, last = p, programs, turns
    if not STRIDING:
        share = (turns + programs - 1) // programs
        first, stride, last = p * share, 1, tl.minimum(turns, (p + 1) * share)
    for turn in range(first, last, stride):
        base = tl.cast(turn, tl.int64) * W
        chunk = rank
        k = (base + chunk) * BLOCK + i
        total = scaled(tl.cast(tl.load(input + k, mask=k < n), ACC), factors, rank, OP)
        for _ in range(1, W):
            wait_credits(ctx, own_words, sent, to, W=W)
            mask = k < n
            slot = next_slot(pointer_at(slots, lane_value(begins, right)), sent, right, SLOT)
            store_to_peer(ctx, slot + i, total, right, mask=mask)
            sent = tl.where(to, sent + 1, sent)
            publish_counters(ctx, own_words, sent, got, peers=neighbours)
            chunk = (chunk + W - forward) % W
            k = (base + chunk) * BLOCK + i
            own = scaled(tl.cast(tl.load(input + k, mask=k < n), ACC), factors, rank, OP)
            wait_blocks(ctx, own_words, got, source, W=W)
            total = combine(tl.load(here(slots, got, left, W, SLOT=SLOT) + i, mask=k < n), own, OP)
            got = tl.where(source, got + 1, got)
        result = finalize(total, element, W, OP)
        tl.store(output + k, result, mask=k < n)
        for _ in range(1, W):
            wait_credits(ctx, own_words, sent, to, W=W)
            slot = next_slot(pointer_at(slots, lane_value(begins, right)), sent, right, SLOT)
            slot = tl.cast(slot, tl.pointer_type(element), bitcast=True)
            mask = k < n
            store_to_peer(ctx, slot + i, result, right, mask=mask)
            sent = tl.where(to, sent + 1, sent)
            publish_counters(ctx, own_words, sent, got, peers=neighbours)
            chunk = (chunk + W - forward) % W
            k = (base + chunk) * BLOCK + i
            wait_blocks(ctx, own_words, got, source, W=W)
            slot = tl.cast(here(slots, got, left, W, SLOT=SLOT), tl.pointer_type(element), bitcast=True)
            result = tl.load(slot + i, mask=k < n)
            tl.store(output + k, result, mask=k < n)
            got = tl.where(source, got + 1, got)
    # The left neighbour's next block, of whatever call, may need the slot of the last one.
    publish_counters(ctx, own_words, sent, got, peers=neighbours)
    store_counters(row, sent, neighbours, got, sources=neighbours)


def launch(call: Call, max_programs: int | None) -> Launch:
    """A launch of all_reduce, of at most ``max_programs`` programs."""
    comm, config, (dtype, _, op) = call.comm, call.config, call.elements
    n = call.elements.number_in(call.input)
    sums, slice_n = accumulator_dtype(dtype), config.all_reduce_ring_slice_n
    asked = max(config.block_bytes(sums.itemsize), (slice_n or 0) * sums.itemsize)
    programs = comm.programs(max_programs, asked, config.few_sms)
    slot_bytes = comm.slot_bytes(programs, config.few_sms)
    block = config.elements_per_block(sums.itemsize, slot_bytes)
    if slice_n:
        if slice_n & (slice_n - 1) or slice_n * sums.itemsize > slot_bytes:
            raise InvalidConfigError(
                f"Config(all_reduce_ring_slice_n={slice_n}) cannot work: a slice of {dtype} is a power of two of "
                f"elements, {slot_bytes // sums.itemsize} at most."
            )
        block = slice_n
    programs = min(programs, -(-n // (block * comm.size)))
    queues = comm.queues(call.line, programs, config.few_sms)
    return kernel_launch(
        call,
        ring,
        programs=programs,
        num_warps=config.warps(block, sums.itemsize),
        dtype=dtype,
        queues=queues.memory(sums),
        n=n,
        rings=config.all_reduce_num_rings or 2,
        W=comm.size,
        BLOCK=block,
        SLOT=queues.slot_bytes // sums.itemsize,
        OP=op,
        STRIDING=config.all_reduce_distribution != 1,
    )


ALGORITHMS = (Algorithm("ring", ("all_reduce",), launch, on_request=True, in_rank_order=False),)
