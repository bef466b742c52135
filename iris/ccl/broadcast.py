"""Large broadcasts: each of the other ranks gets a part from the root, and passes it on to the rest.

A root that sent everything to everybody would need its link W - 1 times. Here part q of each block goes to the q-th of
the other ranks, which pushes it to the rest: every rank receives each byte once, and the root sends each byte once,
(W - 1) parts at a time. Over the link: the bytes of the tensor out of the root and into each other rank, in two steps.
With two ranks there is nobody to pass on to, and `iris.ccl.exchange` does it.

*Dealt*: the root puts the parts into the queues of `iris.ccl.queue`; what is passed on goes straight to tensors on the
symmetric heap, and through the queues to others. A round waits for what peers have posted in the round before, as in
`iris.ccl.two_shot`.

*Pulled*: if all tensors are on the heap, the others read their parts where they lie, and no block has anything to
wait for, as in `iris.ccl.pull`: a meeting before, to learn where the tensors are, and one after. If not, the parts
are dealt.
"""

import functools

import triton.language as tl

from iris.ccl.call import Algorithm, Call
from iris.ccl.communicator import Launch
from iris.ccl.kernel_launch import INTEGERS, kernel_launch
from iris.ccl.pieces import word_bytes
from iris.ccl.queue import (
    AHEAD,
    COUNTS,
    DONE,
    EXITS,
    INPUTS,
    WORDS,
    advertise,
    advertise_input,
    among,
    blocks_of,
    exit_barrier,
    finish,
    lane_value,
    load_counters,
    next_slot,
    pointer_at,
    publish_counters,
    queue_address,
    resolve_output,
    resolve_places,
    slot_of,
    store_counters,
    store_to_peer,
    wait_blocks,
    wait_credits,
)
from iris.language.barrier import lanes
from iris.language.context import DeviceContext
from iris.language.dependent_launch import gdc_wait
from iris.language.flat import flat
from iris.language.jit import jit


@jit
def deal(
    ctx,
    queues,
    input,
    output,
    n,
    length,
    root,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOT: tl.constexpr,
):
    rank = ctx.cur_rank
    p = tl.program_id(0)
    row, own_words = queues.counts + p * COUNTS, queues.words + p * WORDS
    programs = tl.num_programs(0)
    slots = queues.slots
    others = among(0, W, rank)
    sent, got = load_counters(row, others)
    begins = queue_address(ctx, slots, W, SLOT, to=others)
    # The ranks that this one passes its part on to, and gets the other parts from.
    fellows = others & (lanes() != root) & (rank != root)
    from_root = others & (lanes() == root)
    calls_from, direct_here = advertise(ctx, queues, row, own_words, output=output, length=length, W=W, sources=fellows)
    calls_to, place = resolve_output(ctx, queues, row, own_words, to=fellows, W=W)
    queued = fellows & (place == 0)
    address = tl.where(queued, begins, place)
    any_queued = tl.max(tl.cast(queued, tl.int32), axis=0) > 0
    mine = (rank + (W - 1) - root) % W

    i = flat(BLOCK, input.dtype.element_ty)
    blocks = blocks_of(n, (W - 1) * BLOCK)
    steps = (blocks - p + programs - 1) // programs
    last = steps + AHEAD
    if direct_here == 0:
        last = last + AHEAD
    if rank == root:
        last = steps
    for step in range(0, last):
        if rank == root:
            wait_credits(ctx, own_words, sent, others, W=W)
            t = tl.cast(p + step * programs, tl.int64)
            parts = ()
            for q in tl.static_range(W - 1):
                k = (t * (W - 1) + q) * BLOCK + i
                parts += (tl.load(input + k, mask=k < n),)
            for q in tl.static_range(W - 1):
                d = (root + 1 + q) % W
                slot = next_slot(pointer_at(slots, lane_value(begins, d)), sent, d, SLOT)
                mask = (t * (W - 1) + q) * BLOCK + i < n
                store_to_peer(ctx, slot + i, parts[q], d, mask=mask)
            sent = tl.where(others, sent + 1, sent)
        else:
            if (step >= AHEAD) & (step < steps + AHEAD):
                t = tl.cast(p + (step - AHEAD) * programs, tl.int64)
                k = (t * (W - 1) + mine) * BLOCK + i
                wait_blocks(ctx, own_words, got, from_root, W=W)
                data = tl.load(slots + slot_of(p, root, got, W) * SLOT + i, mask=k < n)
                got = tl.where(from_root, got + 1, got)
                tl.store(output + k, data, mask=k < n)
                if any_queued:
                    wait_credits(ctx, own_words, sent, queued, W=W)
                for distance in range(1, W):
                    d = (rank + distance) % W
                    if d != root:
                        begin = pointer_at(slots, lane_value(address, d))
                        if lane_value(tl.cast(queued, tl.int32), d) > 0:
                            store_to_peer(ctx, next_slot(begin, sent, d, SLOT) + i, data, d, mask=k < n)
                        else:
                            store_to_peer(ctx, begin + k, data, d, mask=k < n)
                sent = tl.where(queued, sent + 1, sent)
            if (step >= 2 * AHEAD) & (direct_here == 0):
                t = tl.cast(p + (step - 2 * AHEAD) * programs, tl.int64)
                wait_blocks(ctx, own_words, got, fellows, W=W)
                for distance in range(1, W):
                    s = (rank + distance) % W
                    if s != root:
                        k = (t * (W - 1) + (s + (W - 1) - root) % W) * BLOCK + i
                        data = tl.load(slots + slot_of(p, s, got, W) * SLOT + i, mask=k < n)
                        tl.store(output + k, data, mask=k < n)
                got = tl.where(fellows, got + 1, got)
        publish_counters(ctx, own_words, sent, got, peers=others)
    store_counters(row, sent, others, got, sources=others)
    written, writing = fellows & (queued == 0), fellows & (direct_here != 0)
    finish(ctx, row + DONE, calls_to, written, calls_from=calls_from, sources=writing, W=W)


@jit
def fetch(ctx, places, output, n, root, W: tl.constexpr, BLOCK: tl.constexpr):
    """Read the own part of the root's tensor, which lies with the others at ``places``, and pass it on."""
    rank = ctx.cur_rank
    i = flat(BLOCK, output.dtype.element_ty)
    source = pointer_at(output, lane_value(places, root))
    fellows, gets = (), ()
    for distance in tl.static_range(1, W):
        d = (rank + distance) % W
        fellows += (pointer_at(output, lane_value(places, d)),)
        gets += (d != root,)
    mine = (rank + (W - 1) - root) % W
    for block in range(tl.program_id(0), blocks_of(n, (W - 1) * BLOCK), tl.num_programs(0)):
        k = (tl.cast(block, tl.int64) * (W - 1) + mine) * BLOCK + i
        event = ctx.tracing.begin_move("load", output + i, root, k < n)
        data = tl.load(source + k, mask=k < n)
        ctx.tracing.end_load(event, data)
        for distance in tl.static_range(1, W):
            get = gets[distance - 1]
            store_to_peer(ctx, fellows[distance - 1] + k, data, (rank + distance) % W, mask=(k < n) & get, asked=get)
        tl.store(output + k, data, mask=k < n)


@jit
def broadcast(
    queues,
    input,
    output,
    n,
    length,
    root,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOT: tl.constexpr,
    PULLS: tl.constexpr,
):
    gdc_wait()
    ctx = DeviceContext.initialize(queues.context, num_ranks=W)
    row = queues.counts + tl.program_id(0) * COUNTS
    own_words = queues.words + tl.program_id(0) * WORDS
    if PULLS:
        rank = ctx.cur_rank
        others = among(0, W, rank)
        calls = tl.load(row + EXITS + rank) + 1
        place = own_words + INPUTS
        here = advertise_input(ctx, queues, place, input, length=length, calls=calls, others=others, W=W)
        # What these words point to is read below.
        places = resolve_places(ctx, queues, place, calls, others=others, W=W, ACQUIRES=True)
        if here & (tl.max(tl.cast(others & (places == 0), tl.int32), axis=0) == 0):
            if rank != root:
                fetch(ctx, places, output, n, root=root, W=W, BLOCK=BLOCK)
        else:
            deal(ctx, queues, input, output, n=n, length=length, root=root, W=W, BLOCK=BLOCK, SLOT=SLOT)
        exit_barrier(ctx, row, calls, others, W=W)
    else:
        deal(ctx, queues, input, output, n=n, length=length, root=root, W=W, BLOCK=BLOCK, SLOT=SLOT)


def launch(call: Call, max_programs: int | None, pulls: bool) -> Launch:
    """A launch of broadcast, of at most ``max_programs`` programs. ``pulls``: where all tensors are on the heap."""
    comm, config, nbytes = call.comm, call.config, call.output.nbytes
    word = word_bytes(call, nbytes)
    programs = comm.programs(max_programs)
    block = comm.slot_bytes(programs, config.few_sms) // word
    n = nbytes // word
    programs = min(programs, -(-n // (block * (comm.size - 1))))
    queues = comm.queues(call.line, programs, config.few_sms)
    return kernel_launch(
        call,
        broadcast,
        programs=programs,
        num_warps=config.warps(block, word),
        dtype=INTEGERS[word],
        queues=queues.memory(INTEGERS[word], comm),
        n=n,
        length=nbytes,
        root=call.root,
        W=comm.size,
        BLOCK=block,
        SLOT=queues.slot_bytes // word,
        PULLS=pulls,
    )


# Between two ranks there is nobody to pass on to.
ALGORITHMS = (
    Algorithm("deal", ("broadcast",), functools.partial(launch, pulls=False), min_ranks=3),
    Algorithm("pull", ("broadcast",), functools.partial(launch, pulls=True), min_ranks=3),
)
