"""Sums of any size and type: each rank adds up a part of every block, and pushes the sum to those that want it.

all_reduce: over the link 2 (W - 1) / W times the bytes, in two steps. reduce_scatter: the first step, (W - 1) / W.
reduce: the second step goes to the root alone. The parts travel through the queues of `iris.ccl.queue`, so they may be
read anywhere; the sums go straight to results on the symmetric heap, and through the queues to others. Pushing in both
steps keeps both directions of a link busy, at the rate of stores; loads from a peer are slower and need more in flight.

A program works on several blocks at once: in round t it sends the parts of block t, adds up those of t - AHEAD and
takes in the sums of t - 2 AHEAD. That is also what keeps the queues from locking up: what a program waits for in round
t, room or data, its peers have posted by the end of round t - 1, so whoever is furthest behind can always go on. (Room:
with A for AHEAD, the last block of round t is number 2t - A + 1, and a peer has taken 2t - 3A by the end of its round
t - 1; so 2A + 2 slots.)

Sums are formed by one rank each, in the order of ranks, so all ranks have the same bits.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris.ccl.combine import accumulator, gluon_combine, triton_combine
from iris.ccl.queue import AHEAD, COUNTS, GOT, NUM_SLOTS, SENT, WORDS, gluon_queue, triton_queue
from iris.language.context import DeviceContext, IrisDeviceCtx


def make_two_shot(jit, lang, queue, combining, Context):
    """The kernel in the language that ``(jit, lang)`` stand for."""
    pick, among, flat, lanes, blocks_of = queue.pick, queue.among, queue.flat, queue.lanes, queue.blocks_of
    follow_predecessor, slot_of, keep = queue.follow_predecessor, queue.slot_of, queue.keep
    queue_address, pointer_at, offer, find = queue.queue_address, queue.pointer_at, queue.offer, queue.find
    await_room, await_blocks, post, await_taken = (
        queue.await_room, queue.await_blocks, queue.post, queue.await_taken,
    )  # fmt: skip
    scaled, combine, conclude = combining.scaled, combining.combine, combining.conclude

    @jit
    def add_up(
        ctx,
        row,
        own_words,
        slots,
        heap_table,
        input,
        output,
        factors,
        n,
        part_step,
        block_step,
        limit_step,
        out_part_step,
        length,
        to_first,
        to_last,
        W: tl.constexpr,
        BLOCK: tl.constexpr,
        SLOT: tl.constexpr,
        OP: tl.constexpr,
        SPREADS: tl.constexpr,
        DIRECT: tl.constexpr,
    ):
        rank = ctx.cur_rank
        p = lang.program_id(0)
        programs = lang.num_programs(0)
        element: tl.constexpr = input.dtype.element_ty
        ACC: tl.constexpr = accumulator(element)
        others = among(0, W, rank)
        sent = lang.load(row + SENT + lanes(), mask=others, other=0)
        got = lang.load(row + GOT + lanes(), mask=others, other=0)
        queues = queue_address(ctx, slots, W, SLOT, others)
        keeps = (rank >= to_first) & (rank < to_last)
        to = among(to_first, to_last, rank) & SPREADS
        sources = others & keeps & SPREADS
        queued = to
        address = queues
        direct_here = rank < 0
        if DIRECT:
            _, direct_here = offer(ctx, row, own_words, heap_table, output, length, W, sources)
            _, place = find(ctx, row, own_words, heap_table, to)
            queued = to & (place == 0)
            address = lang.where(queued, queues, place)
        any_queued = lang.max(lang.cast(queued, lang.int32), axis=0) > 0
        receives = keeps & (direct_here == 0) & SPREADS

        i = flat(BLOCK, element)
        # How many blocks there are: of the first part, which is the longest.
        blocks = blocks_of(n, block_step)
        steps = (blocks - p + programs - 1) // programs
        last = steps + AHEAD
        if receives:
            last = last + AHEAD
        for step in range(0, last):
            if step < steps:
                await_room(ctx, own_words, sent, others, W)
                t = lang.cast(p + step * programs, lang.int64)
                k = t * block_step + i
                # All loads before all stores, which the compiler cannot know to be of other memory.
                parts = ()
                for distance in lang.static_range(1, W):
                    d = (rank + distance) % W
                    parts += (lang.load(input + lang.cast(d, lang.int64) * part_step + k, mask=d * limit_step + k < n),)
                for distance in lang.static_range(1, W):
                    d = (rank + distance) % W
                    slot = pointer_at(slots, pick(queues, d)) + (pick(sent, d) & (NUM_SLOTS - 1)) * SLOT
                    event = ctx.tracing.begin_move("store", slots + i, d, d * limit_step + k < n)
                    lang.store(slot + i, parts[distance - 1], mask=d * limit_step + k < n)
                    ctx.tracing.record_event_end(event)
                sent = lang.where(others, sent + 1, sent)
            if (step >= AHEAD) & (step < steps + AHEAD):
                t = lang.cast(p + (step - AHEAD) * programs, lang.int64)
                k = t * block_step + i
                mask = rank * limit_step + k < n
                own = lang.load(input + lang.cast(rank, lang.int64) * part_step + k, mask=mask)
                await_blocks(ctx, own_words, got, others, W)
                total = lang.cast(own, ACC)
                for s in lang.static_range(W):
                    # Its own slots hold nothing; the address is a valid one.
                    there = slots + slot_of(p, s, got, W) * SLOT + i
                    value = lang.load(there, mask=mask & (rank != s))
                    value = scaled(lang.cast(lang.where(rank == s, own, value), ACC), factors, s, OP)
                    if s == 0:
                        total = value
                    else:
                        total = combine(total, value, OP)
                got = lang.where(others, got + 1, got)
                result = conclude(total, element, W, OP)
                if keeps:
                    lang.store(output + rank * out_part_step + k, result, mask=mask)
                if SPREADS:
                    if any_queued:
                        await_room(ctx, own_words, sent, queued, W)
                    for distance in range(1, W):
                        d = (rank + distance) % W
                        if (d >= to_first) & (d < to_last):
                            begin = pointer_at(slots, pick(address, d))
                            event = ctx.tracing.begin_move("store", slots + i, d, mask)
                            if pick(lang.cast(queued, lang.int32), d) > 0:
                                slot = begin + (pick(sent, d) & (NUM_SLOTS - 1)) * SLOT
                                lang.store(slot + i, result, mask=mask)
                            else:
                                lang.store(begin + rank * out_part_step + k, result, mask=mask)
                            ctx.tracing.record_event_end(event)
                    if any_queued:
                        sent = lang.where(queued, sent + 1, sent)
            if SPREADS:
                if (step >= 2 * AHEAD) & receives:
                    t = lang.cast(p + (step - 2 * AHEAD) * programs, lang.int64)
                    k = t * block_step + i
                    await_blocks(ctx, own_words, got, sources, W)
                    for distance in range(1, W):
                        s = (rank + distance) % W
                        mask = s * limit_step + k < n
                        value = lang.load(slots + slot_of(p, s, got, W) * SLOT + i, mask=mask)
                        lang.store(output + s * out_part_step + k, value, mask=mask)
                    got = lang.where(sources, got + 1, got)
            # Fewer blocks than AHEAD leave rounds with nothing to do.
            if (step < steps) | ((step >= AHEAD) & (step < steps + AHEAD)) | (step >= 2 * AHEAD):
                post(ctx, own_words, sent, got, others)
        keep(row + SENT + lanes(), sent, others)
        keep(row + GOT + lanes(), got, others)
        if DIRECT:
            # A rank posts that it took my last block behind having written the sums of it, here too.
            await_taken(ctx, own_words, sent, sources & (direct_here != 0), W)

    @jit
    def two_shot(
        context_tensor,
        counts,
        words,
        slots,
        heap_table,
        input,
        output,
        factors,
        n,
        part_step,
        block_step,
        limit_step,
        out_part_step,
        length,
        to_first,
        to_last,
        W: tl.constexpr,
        BLOCK: tl.constexpr,
        SLOT: tl.constexpr,
        OP: tl.constexpr,
        SPREADS: tl.constexpr,
        DIRECT: tl.constexpr,
    ):
        """Part d of block t begins at ``d * part_step + t * block_step`` and ends where ``d * limit_step`` + ... < n.

        ``to_first`` to before ``to_last``: the ranks that want the sums, if it ``SPREADS`` them.
        """
        follow_predecessor()
        ctx = Context.initialize(context_tensor, num_ranks=W)
        add_up(
            ctx, counts + lang.program_id(0) * COUNTS, words + lang.program_id(0) * WORDS, slots, heap_table,
            input, output, factors, n, part_step, block_step, limit_step, out_part_step, length, to_first, to_last,
            W, BLOCK, SLOT, OP, SPREADS, DIRECT,
        )  # fmt: skip

    return add_up, two_shot


triton_add_up, triton_two_shot = make_two_shot(triton.jit, tl, triton_queue, triton_combine, DeviceContext)
gluon_add_up, gluon_two_shot = make_two_shot(gluon.jit, gl, gluon_queue, gluon_combine, IrisDeviceCtx)
