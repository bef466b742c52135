"""Sums of small and medium size: ranks push what the others need, and each element tells that it has arrived.

Two kernels. *One shot*: every rank pushes its part to all that want it, and each adds up what it got: over the link
W - 1 times the bytes, in one step. *Two shot*: rank d adds up the d-th part of each block and pushes the sum to all:
2 (W - 1) / W times the bytes, in two steps. No flag, no fence, no barrier: each element is its own flag
(`iris.language.lamport`), so this is for floating-point types.

There are 3 slots. In each a block has a region of its own, ``[steps, W sources, PART bytes]``, and it counts its epochs
modulo 3. In epoch e the ranks use slot e % 3, and each clears what slot (e - 1) % 3 held: all that peers may have put
into the block's region, whatever this call needs.
Why three slots, and why that is in order: a rank writes to slot e % 3 of mine in its call e. It has heard from me in
its call e - 1, so my call e - 2 was over, at the end of which everything was visible to everybody; and in that call I
cleared slot (e - 3) % 3 = e % 3, having read all of it in e - 3. With two slots I would be clearing while it writes.
(In two shot a rank whose part is beyond the end of the tensor sends no sums; whoever has heard rank 0's, which were of
parts from all, has heard from it.)

Sums are formed in the order of ranks, on each rank or on one, so all ranks have the same bits.
"""

import triton.language as tl

from iris.ccl.combine import accumulator, combine, finalize, scaled
from iris.ccl.queue import flat
from iris.language.address import translate
from iris.language.context import DeviceContext
from iris.language.dependent_launch import gdc_launch_dependents, gdc_wait
from iris.language.failures import WAIT_LIMIT_NS, expired, nanoseconds
from iris.language.jit import jit
from iris.language.lamport import (
    decode,
    elements_per_word,
    lamport_clear,
    lamport_recv,
    lamport_send,
    missing_elements,
    sentinel_mask,
    word_type,
    words_at,
)
from iris.language.ll import record_missing
from iris.language.ordering import load_relaxed, store_after_sync
from iris.language.target import threads_per_warp

# Bytes that a block's parts have together, at most; the parts of W ranks are powers of two.
BLOCK_BYTES = 8192
# What a warp moves at once. Parts are that small where there are programs for all of them: all is under way at once.
WARP_BYTES = 512
SLOTS = tl.constexpr(3)
# Blocks that a program sends before it waits for the first of them, so that the links are busy while it adds up.
AHEAD = tl.constexpr(1)


def part_bytes(size: int, share: int, programs: int) -> int:
    """Bytes of a block that belong to one of ``size`` ranks, where a rank adds up ``share`` bytes with ``programs``."""
    # A word of 8 bytes at most for each thread of a warp, which polls one of its own (`iris.language.lamport`).
    most = max(8 * threads_per_warp(), BLOCK_BYTES // (1 << (size - 1).bit_length()))
    part = min(WARP_BYTES, most)
    while part < most and part * programs < share:
        part *= 2
    return part


def channel_bytes(size: int, blocks: int, part: int, steps: int) -> int:
    """Bytes of the epochs and the regions of so many blocks with parts of ``part`` bytes, sent in so many steps."""
    return blocks * (4 + SLOTS.value * steps * size * part)


@jit
def add_up(parts, own, k, count, rank, W: tl.constexpr, PART: tl.constexpr, OP: tl.constexpr, record, factors=None):
    """Wait for the first ``count`` elements of every rank's part and combine them in the order of ranks.

    ``own`` is the caller's; ``k``: numbers of all words of a part. All parts are read in each round of polling, so
    that their loads are under way together: also what is beyond ``count``, as a mask would take the words apart.
    """
    element: tl.constexpr = own.dtype
    ACC: tl.constexpr = accumulator(element)
    WORDS: tl.constexpr = PART // elements_per_word(element)
    begins, bits = words_at(parts, element), sentinel_mask(k, count, element)
    if WAIT_LIMIT_NS > 0:
        since = nanoseconds(record)
    words = ()
    for _s in tl.static_range(W):
        words += (bits * 0,)
    missing = 1
    while missing > 0:
        words = ()
        for s in tl.static_range(W):
            words += (load_relaxed(begins + (s * WORDS + k), (k < WORDS) & (rank != s)),)
        late = bits * 0
        for s in tl.static_range(W):
            late = late | tl.where(rank == s, 0, missing_elements(words[s], bits, element))
        missing = tl.max(tl.cast(late != 0, tl.int32), axis=0)
        if WAIT_LIMIT_NS > 0:
            if missing > 0:
                if expired(record, since):
                    ranks = tl.cast(0, tl.int64)
                    for s in tl.static_range(W):
                        none = (rank != s) & (missing_elements(words[s], bits, element) != 0)
                        ranks = ranks | (tl.cast(tl.max(tl.cast(none, tl.int32), axis=0), tl.int64) << s)
                    record_missing(begins + k, bits != 0, 0, ranks, record)
                    missing = missing * 0
    total = tl.cast(own, ACC)
    for s in tl.static_range(W):
        value = tl.where(rank == s, tl.cast(own, ACC), tl.cast(decode(words[s], element, own), ACC))
        value = scaled(value, factors, s, OP)
        if s == 0:
            total = value
        else:
            total = combine(total, value, OP)
    return finalize(total, element, W, OP)


@jit
def peers(ctx, W: tl.constexpr):
    """Where the workspaces of the other ranks begin, the right neighbour first."""
    bases = ()
    for distance in tl.static_range(1, W):
        bases += (tl.load(ctx.table + (ctx.cur_rank + distance) % W),)
    return bases


@jit
def region(slots, max_blocks, block, epoch, REGION: tl.constexpr):
    """A block's part of a slot. What a call uses lies side by side: blocks within slots."""
    return slots + (tl.cast(epoch % SLOTS, tl.int64) * max_blocks + block) * REGION


@jit
def recycle_slot(
    slots, epochs, max_blocks, block, epoch, j, rank, W: tl.constexpr, PART: tl.constexpr, STEPS: tl.constexpr
):
    """Clear what peers have put into the last epoch's slot, and count this one."""
    old = region(slots, max_blocks, block, epoch + (SLOTS - 1), STEPS * W * PART)
    for step in tl.static_range(STEPS):
        lamport_clear(old + step * W * PART + j, (j < W * PART) & (j // PART != rank))
    store_after_sync(epochs + block, (epoch + 1) % SLOTS)


@jit
def one_shot(
    context_tensor,
    epochs,
    slots,
    input,
    output,
    factors,
    n,
    max_blocks,
    send_step,
    W: tl.constexpr,
    RANKS: tl.constexpr,
    PART: tl.constexpr,
    OP: tl.constexpr,
    SAME: tl.constexpr,
    EARLY: tl.constexpr,
):
    """``max_blocks``: blocks that a slot has room for. ``EARLY``: there is room for the next launch beside this one.

    ``send_step``: from what one rank wants to what the next one wants; 0 if all want the `SAME`.
    """
    ctx = DeviceContext.initialize(context_tensor, num_ranks=W)
    rank, bases = ctx.cur_rank, peers(ctx, W)
    gdc_wait()
    if EARLY:
        gdc_launch_dependents()
    element: tl.constexpr = input.dtype.element_ty
    i = flat(PART, element)
    j = flat(RANKS * PART, element)
    words = flat(PART // elements_per_word(element), word_type(element))
    first, stride = tl.program_id(0), tl.num_programs(0)
    steps = ((n + PART - 1) // PART - first + stride - 1) // stride
    for step in range(0, steps + AHEAD):
        if step < steps:
            block = first + step * stride
            mine = region(slots, max_blocks, block, tl.load(epochs + block), W * PART) + rank * PART
            k = block * PART + i
            # All loads before all stores, which the compiler cannot know to be of other memory.
            parts = ()
            for distance in tl.static_range(1, W):
                to = tl.cast((rank + distance) % W, tl.int64)
                if SAME and distance > 1:
                    parts += (parts[0],)
                else:
                    parts += (tl.load(input + to * send_step + k, mask=k < n),)
            for distance in tl.static_range(1, W):
                event = ctx.tracing.begin_move("store", mine + i, (rank + distance) % W, k < n)
                lamport_send(translate(mine, ctx.base, bases[distance - 1]) + i, parts[distance - 1], k < n)
                ctx.tracing.record_event_end(event)
        if step >= AHEAD:
            block = first + (step - AHEAD) * stride
            epoch = tl.load(epochs + block)
            k = block * PART + i
            own = tl.load(input + tl.cast(rank, tl.int64) * send_step + k, mask=k < n)
            parts = region(slots, max_blocks, block, epoch, W * PART)
            event = ctx.tracing.begin_wait_for_data(parts, rank)
            total = add_up(parts, own, words, n - block * PART, rank, W, PART, OP, ctx._record(), factors)
            ctx.tracing.record_event_end(event)
            tl.store(output + k, total, mask=k < n)
            recycle_slot(slots, epochs, max_blocks, block, epoch, j, rank, W, PART, 1)


@jit
def two_shot(
    context_tensor,
    epochs,
    slots,
    input,
    output,
    factors,
    n,
    max_blocks,
    W: tl.constexpr,
    RANKS: tl.constexpr,
    PART: tl.constexpr,
    OP: tl.constexpr,
    EARLY: tl.constexpr,
):
    ctx = DeviceContext.initialize(context_tensor, num_ranks=W)
    rank, bases = ctx.cur_rank, peers(ctx, W)
    gdc_wait()
    if EARLY:
        gdc_launch_dependents()
    element: tl.constexpr = input.dtype.element_ty
    WORDS: tl.constexpr = PART // elements_per_word(element)
    i = flat(PART, element)
    j = flat(RANKS * PART, element)
    words, all_words = flat(WORDS, word_type(element)), flat(RANKS * WORDS, word_type(element))
    first, stride = tl.program_id(0), tl.num_programs(0)
    steps = ((n + W * PART - 1) // (W * PART) - first + stride - 1) // stride
    for step in range(0, steps + 2 * AHEAD):
        if step < steps:
            block = first + step * stride
            mine = region(slots, max_blocks, block, tl.load(epochs + block), 2 * W * PART) + rank * PART
            parts = ()
            for distance in tl.static_range(1, W):
                k = (block * W + (rank + distance) % W) * PART + i
                parts += (tl.load(input + k, mask=k < n),)
            for distance in tl.static_range(1, W):
                k = (block * W + (rank + distance) % W) * PART + i
                event = ctx.tracing.begin_move("store", mine + i, (rank + distance) % W, k < n)
                lamport_send(translate(mine, ctx.base, bases[distance - 1]) + i, parts[distance - 1], k < n)
                ctx.tracing.record_event_end(event)
        if (step >= AHEAD) & (step < steps + AHEAD):
            block = first + (step - AHEAD) * stride
            parts = region(slots, max_blocks, block, tl.load(epochs + block), 2 * W * PART)
            k = (block * W + rank) * PART + i
            own = tl.load(input + k, mask=k < n)
            event = ctx.tracing.begin_wait_for_data(parts, rank)
            left = n - (block * W + rank) * PART
            total = add_up(parts, own, words, left, rank, W, PART, OP, ctx._record(), factors)
            ctx.tracing.record_event_end(event)
            tl.store(output + k, total, mask=k < n)
            for distance in tl.static_range(1, W):
                event = ctx.tracing.begin_move("store", parts + i, (rank + distance) % W, k < n)
                lamport_send(translate(parts + (W + rank) * PART, ctx.base, bases[distance - 1]) + i, total, k < n)
                ctx.tracing.record_event_end(event)
        if step >= 2 * AHEAD:
            block = first + (step - 2 * AHEAD) * stride
            epoch = tl.load(epochs + block)
            k = block * W * PART + j
            # The sums lie beside each other as they do in the output.
            there = (j < W * PART) & (j // PART != rank) & (k < n)
            sums = region(slots, max_blocks, block, epoch, 2 * W * PART) + W * PART
            sources = all_words // WORDS
            others = (sources < W) & (sources != rank)
            bits = tl.where(others, sentinel_mask(all_words, n - block * W * PART, element), 0)
            event = ctx.tracing.begin_wait_for_data(sums, rank)
            total = lamport_recv(words_at(sums, element) + all_words, others, bits, element, j, sources, ctx._record())
            ctx.tracing.record_event_end(event)
            tl.store(output + k, total, mask=there)
            recycle_slot(slots, epochs, max_blocks, block, epoch, j, rank, W, PART, 2)
