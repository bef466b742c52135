"""Sums of any size and type: each rank adds up a part of every block, and pushes the sum to those that want it.

all_reduce: over the link 2 (W - 1) / W times the bytes, in two steps. reduce_scatter: the first step, (W - 1) / W.
reduce: the second step goes to the root alone. The parts travel through the queues of `iris.ccl.queue`, so they may be
read anywhere; the sums go straight to results on the symmetric heap, and through the queues to others. Pushing in both
steps keeps both directions of a link busy, at the rate of stores; loads from a peer are slower and need more in flight.

For example, 64 MiB of bf16 among 4 H200: 128 programs of 16 warps, blocks of 64 KiB with a part of 16 KiB for each
rank, so 1024 blocks in 8 rounds. 96 MiB leave the rank.

A program works on several blocks at once: in round t it sends the parts of block t, adds up those of t - AHEAD and
takes in the sums of t - 2 AHEAD.

Why no program waits for ever: what it waits for in round t, room or data, its peers have posted by the end of their
round t - 1. So the program that is furthest behind can always go on. (Room: with A for AHEAD, the last block of round t
is number 2t - A + 1, and a peer has taken 2t - 3A by the end of its round t - 1; so 2A + 2 slots.)

Why data are read after they are written: each count is posted with release after the stores it counts, and waited for
with acquire (`iris.ccl.queue`). A sum that goes straight to a result has no count of its own. Its sender posts that it
has *taken* the receiver's last block after the last of these stores, and the receiver waits for that before it ends.

Why a result may be the input: rank d writes part d of a block of this rank's result only after it has acquired this
rank's post of that block, and this rank posted it after its loads of that part.

Sums are formed by one rank each, in the order of ranks, so all ranks have the same bits.
"""

from typing import Any

import torch
import triton.language as tl

from iris.ccl.call import Algorithm, Call
from iris.ccl.combine import accumulate, accumulator, finalize
from iris.ccl.communicator import Launch
from iris.ccl.kernel_arguments import BlockTiling, PartLayout
from iris.ccl.kernel_launch import kernel_launch
from iris.ccl.queue import (
    AHEAD,
    COUNTS,
    LONGEST_QUEUED,
    WORDS,
    advertise,
    among,
    blocks_of,
    lane_value,
    load_counters,
    next_slot,
    pointer_at,
    publish_counters,
    queue_address,
    resolve_output,
    slot_of,
    store_counters,
    store_to_peer,
    wait_blocks,
    wait_consumed,
    wait_credits,
)
from iris.language.context import DeviceContext
from iris.language.dependent_launch import gdc_wait
from iris.language.flat import flat
from iris.language.jit import jit


@jit
def reduce_blocks(
    ctx,
    queues,
    input,
    output,
    factors,
    layout,
    length,
    to_first,
    to_last,
    W: tl.constexpr,
    TILING: tl.constexpr,
    OP: tl.constexpr,
    ALL_REDUCE: tl.constexpr,
    DIRECT: tl.constexpr,
):
    rank = ctx.cur_rank
    p = tl.program_id(0)
    row, own_words = queues.counts + p * COUNTS, queues.words + p * WORDS
    programs = tl.num_programs(0)
    slots = queues.slots
    BLOCK: tl.constexpr = TILING.BLOCK
    SLOT: tl.constexpr = TILING.SLOT
    element: tl.constexpr = input.dtype.element_ty
    ACC: tl.constexpr = accumulator(element)
    others = among(0, W, rank)
    sent, got = load_counters(row, others)
    begins = queue_address(ctx, slots, W, SLOT, to=others)
    keeps = (rank >= to_first) & (rank < to_last)
    to = among(to_first, to_last, rank) & ALL_REDUCE
    sources = others & keeps & ALL_REDUCE
    queued = to
    address = begins
    direct_here = rank < 0
    if DIRECT:
        _, direct_here = advertise(ctx, queues, row, own_words, output=output, length=length, W=W, sources=sources)
        _, place = resolve_output(ctx, queues, row, own_words, to=to, W=W)
        queued = to & (place == 0)
        address = tl.where(queued, begins, place)
    any_queued = tl.max(tl.cast(queued, tl.int32), axis=0) > 0
    receives = keeps & (direct_here == 0) & ALL_REDUCE

    i = flat(BLOCK, element)
    # How many blocks there are: of the first part, which is the longest.
    blocks = blocks_of(layout.n, layout.block_step)
    steps = (blocks - p + programs - 1) // programs
    last = steps + AHEAD
    if receives:
        last = last + AHEAD
    for step in range(0, last):
        if step < steps:
            wait_credits(ctx, own_words, sent, others, W=W)
            t = tl.cast(p + step * programs, tl.int64)
            k = t * layout.block_step + i
            # All loads before all stores, which the compiler cannot know to be of other memory.
            parts = ()
            for distance in tl.static_range(1, W):
                d = (rank + distance) % W
                mask = d * layout.limit_step + k < layout.n
                parts += (tl.load(input + tl.cast(d, tl.int64) * layout.part_step + k, mask=mask),)
            for distance in tl.static_range(1, W):
                d = (rank + distance) % W
                slot = next_slot(pointer_at(slots, lane_value(begins, d)), sent, d, SLOT)
                store_to_peer(ctx, slot + i, parts[distance - 1], d, mask=d * layout.limit_step + k < layout.n)
            sent = tl.where(others, sent + 1, sent)
        if (step >= AHEAD) & (step < steps + AHEAD):
            t = tl.cast(p + (step - AHEAD) * programs, tl.int64)
            k = t * layout.block_step + i
            mask = rank * layout.limit_step + k < layout.n
            own = tl.load(input + tl.cast(rank, tl.int64) * layout.part_step + k, mask=mask)
            wait_blocks(ctx, own_words, got, others, W=W)
            total = tl.cast(own, ACC)
            for s in tl.static_range(W):
                # Of the own rank nothing is loaded; its slot's address is a valid one all the same.
                there = slots + slot_of(p, s, got, W) * SLOT + i
                value = tl.load(there, mask=mask & (rank != s))
                total = accumulate(total, tl.where(rank == s, own, value), factors, s, OP=OP)
            got = tl.where(others, got + 1, got)
            result = finalize(total, element, W, OP)
            if keeps:
                tl.store(output + rank * layout.out_part_step + k, result, mask=mask)
            if ALL_REDUCE:
                if any_queued:
                    wait_credits(ctx, own_words, sent, queued, W=W)
                for distance in range(1, W):
                    d = (rank + distance) % W
                    if (d >= to_first) & (d < to_last):
                        begin = pointer_at(slots, lane_value(address, d))
                        if lane_value(tl.cast(queued, tl.int32), d) > 0:
                            store_to_peer(ctx, next_slot(begin, sent, d, SLOT) + i, result, d, mask=mask)
                        else:
                            store_to_peer(ctx, begin + rank * layout.out_part_step + k, result, d, mask=mask)
                if any_queued:
                    sent = tl.where(queued, sent + 1, sent)
        if ALL_REDUCE:
            if (step >= 2 * AHEAD) & receives:
                t = tl.cast(p + (step - 2 * AHEAD) * programs, tl.int64)
                k = t * layout.block_step + i
                wait_blocks(ctx, own_words, got, sources, W=W)
                for distance in range(1, W):
                    s = (rank + distance) % W
                    mask = s * layout.limit_step + k < layout.n
                    value = tl.load(slots + slot_of(p, s, got, W) * SLOT + i, mask=mask)
                    tl.store(output + s * layout.out_part_step + k, value, mask=mask)
                got = tl.where(sources, got + 1, got)
        # Fewer blocks than AHEAD leave rounds with nothing to do.
        if (step < steps) | ((step >= AHEAD) & (step < steps + AHEAD)) | (step >= 2 * AHEAD):
            publish_counters(ctx, own_words, sent, got, peers=others)
    store_counters(row, sent, others, got, sources=others)
    if DIRECT:
        # A peer posts that it has taken this rank's last block after it has written the sums of it here.
        wait_consumed(ctx, own_words, sent, sources & (direct_here != 0), W=W)


@jit
def two_shot(
    queues,
    input,
    output,
    factors,
    layout,
    length,
    to_first,
    to_last,
    W: tl.constexpr,
    TILING: tl.constexpr,
    OP: tl.constexpr,
    ALL_REDUCE: tl.constexpr,
    DIRECT: tl.constexpr,
):
    """``to_first`` to before ``to_last``: the ranks that want the sums, with ``ALL_REDUCE``.

    ``length``: bytes of the output. ``DIRECT``: sums go straight to outputs on the symmetric heap.
    """
    gdc_wait()
    ctx = DeviceContext.initialize(queues.context, num_ranks=W)
    reduce_blocks(
        ctx,
        queues,
        input,
        output,
        factors=factors,
        layout=layout,
        length=length,
        to_first=to_first,
        to_last=to_last,
        W=W,
        TILING=TILING,
        OP=OP,
        ALL_REDUCE=ALL_REDUCE,
        DIRECT=DIRECT,
    )


def launch(call: Call, max_programs: int | None) -> Launch:
    """A launch of all_reduce, reduce_scatter or reduce, of at most ``max_programs`` programs."""
    comm, length = call.comm, call.output.nbytes
    scattered = call.collective == "reduce_scatter"
    to = range(call.root, call.root + 1) if call.collective == "reduce" else range(comm.size)
    launched = kernel_launch(
        call,
        two_shot,
        **shared_arguments(call, max_programs),
        length=length,
        to_first=to.start,
        to_last=to.stop,
        DIRECT=not scattered and length > LONGEST_QUEUED.value,
    )
    alone = comm.size == 1 and call.collective == "all_reduce" and not call.more
    return _unless_in_place(launched) if alone else launched


def shared_arguments(call: Call, max_programs: int | None) -> dict[str, Any]:
    """Programs, warps, and the arguments that `two_shot` shares with `iris.ccl.pull`.

    In reduce_scatter a part is what one rank wants, and each is divided into blocks. Else the whole tensor is divided
    into blocks, and each of these into parts.
    """
    comm, config, (dtype, _, op) = call.comm, call.config, call.elements
    scattered = call.collective == "reduce_scatter"
    n = call.elements.number_in(call.output)
    programs = comm.programs(max_programs, config.block_bytes(dtype.itemsize), config.few_sms)
    block = config.elements_per_block(dtype.itemsize, comm.slot_bytes(programs, config.few_sms))
    block_step = block if scattered else block * comm.size
    programs = min(programs, -(-n // block_step))
    queues = comm.queues(call.line, programs, config.few_sms)
    return dict(
        programs=programs,
        num_warps=config.warps(block, dtype.itemsize),
        dtype=dtype,
        queues=queues.memory(dtype, comm),
        layout=PartLayout(
            n=n,
            part_step=call.send_step if scattered else block,
            block_step=block_step,
            limit_step=0 if scattered else block,
            out_part_step=0 if scattered else block,
        ),
        W=comm.size,
        TILING=BlockTiling(block, queues.slot_bytes // dtype.itemsize),
        OP=op,
        ALL_REDUCE=not scattered,
    )


def _unless_in_place(launched: Launch) -> Launch:
    """Of one rank, whose sum is its input: there is nothing to do where that is the output."""

    def enqueue(stream: int | None, input: torch.Tensor, output: torch.Tensor) -> None:
        if input.data_ptr() != output.data_ptr():
            launched(stream, input, output)

    return enqueue


ALGORITHMS = (Algorithm("two_shot", ("all_reduce", "reduce_scatter", "reduce"), launch),)
