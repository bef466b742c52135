"""combine for few tokens: sums go to the ranks of the tokens as messages that are their own flags.

Over the link, in one step: from each rank of a token's experts one row of H elements, as in `iris.experts.combine`, and
results are those, but for the bits of NaNs; from each rank to each other 8 bytes. Weights that are given here go to the
experts' ranks first, 8 K bytes a token, in a step of their own.

Programs share tokens as in dispatch: ``SPLIT`` of them have a slice each of the rows of tokens t, t + T, ... of every
rank. Each:

1. Program 0 tells all other ranks that this rank's dispatch is over. Weights that are given go to all of them, from
   the first program of a token.
2. Adds up the rows of tokens of other ranks, in float32, in the order of their choices, and sends the sums.
3. For its own tokens adds up the rows that are here, waits for the sums of other ranks and clears the messages, and
   adds all up in the order of ranks, and then what the caller gives besides, its bias.
4. Program 0 waits until the dispatches of all other ranks are over. Then the next one in this slot may write to them.

Steps 1 and 2, and 3 and 4, may be launches of their own, one after the other (``async_op=True``).

Who writes which word, and why it may be written again: `iris.experts.low_latency.memory`.
"""

import triton
import triton.language as tl

from iris.experts.combine import add_bias, load_bias
from iris.experts.low_latency.messages import clear, parts_of, pitch_of, receive, room_of, send
from iris.experts.low_latency.placing import EXPERT, load_places, slice_of
from iris.experts.routing import RECEIVE, SEND, any_is, choices, owners
from iris.experts.statistics import begin_wait, end_combine_wait
from iris.experts.token_rows import GIVEN, UNWEIGHTED
from iris.language.address import translate
from iris.language.context import DeviceContext
from iris.language.dependent_launch import gdc_wait
from iris.language.fences import cta_sync
from iris.language.ll import ll_send
from iris.language.ll_poll import ll_recv_shared

# Loads of 16 bytes of a thread that are under way together, 4 registers each.
LOADS = 16


@triton.jit
def announce_end(ctx, slot, call, EXTENTS: tl.constexpr):
    """The beginning of this launch is the end of the dispatch."""
    peer = tl.arange(0, EXTENTS.RANKS)
    others = (peer < EXTENTS.W) & (peer != ctx.cur_rank)
    bases = tl.load(ctx.table + peer, mask=others, other=0)
    ll_send(translate(slot.over + ctx.cur_rank + 0 * peer, ctx.base, bases), 0 * peer, call, others)


@triton.jit
def await_ends(ctx, slot, call, statistics, EXTENTS: tl.constexpr):
    W: tl.constexpr = EXTENTS.W
    peer = tl.arange(0, EXTENTS.RANKS)
    others = (peer < EXTENTS.W) & (peer != ctx.cur_rank)
    if statistics is not None:
        # One rank after the other, so that the time of each wait is that of one rank: of when all threads have their
        # words.
        for source in tl.static_range(W):
            begun = begin_wait(statistics)
            ll_recv_shared(
                (slot.over + peer,), call, (others & (peer == source),), sources=(peer,), record=ctx._record()
            )
            cta_sync()
            end_combine_wait(statistics, source, begun)
    ll_recv_shared((slot.over + peer,), call, (others,), sources=(peer,), record=ctx._record())


@triton.jit
def send_weights(ctx, slot, topk_weights, token, tokens, call, EXTENTS: tl.constexpr):
    """Of an own token, to the other ranks."""
    W: tl.constexpr = EXTENTS.W
    k = choices(EXTENTS)
    mask = (k < EXTENTS.K) & (token < tokens)
    weights = tl.load(topk_weights + token * EXTENTS.K + k, mask=mask, other=0).to(tl.int32, bitcast=True)
    region = (ctx.cur_rank * EXTENTS.M + token) * EXTENTS.K
    for distance in tl.static_range(1, W):
        base = tl.load(ctx.table + (ctx.cur_rank + distance) % EXTENTS.W)
        ll_send(translate(slot.given + region, ctx.base, base) + k, weights, call, k < EXTENTS.K)


@triton.jit
def load_weights(weights, number, places, EXTENTS: tl.constexpr):
    """Of the choices of a token that have a row here; of the others 0, whatever there is."""
    K: tl.constexpr = EXTENTS.K
    found = ()
    for choice in tl.static_range(K):
        # Not after the load of the place.
        weight = tl.load(weights + number * EXTENTS.K + choice)
        found += (tl.where(places[choice] >= 0, weight, 0.0),)
    return found


@triton.jit
def receive_weights(ctx, slot, places, number, source, call, EXTENTS: tl.constexpr):
    """The same, of those that rank ``source`` sends now."""
    K: tl.constexpr = EXTENTS.K
    k = choices(EXTENTS)
    at = slot.given + number * EXTENTS.K + k
    (words,) = ll_recv_shared((at,), call, (k < EXTENTS.K,), sources=(source + 0 * k,), record=ctx._record())
    found = ()
    for choice in tl.static_range(K):
        word = tl.sum(tl.where(k == choice, words, 0), axis=0)
        found += (tl.where(places[choice] >= 0, word.to(tl.float32, bitcast=True), 0.0),)
    return found


@triton.constexpr_function
def parts_together(parts, choices):
    """How many of a slice's parts are added up in a round, so that a thread has registers for their loads."""
    return next((some for some in range(parts, 1, -1) if parts % some == 0 and some * choices <= LOADS), 1)


@triton.jit
def add_up(
    y,
    places,
    weights,
    first,
    WEIGHTS: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    ROOM: tl.constexpr,
    EXTENTS: tl.constexpr,
):
    """The sum of a token's rows on this rank, float32, in the order of its choices, from the column ``first`` on.

    A tuple with a block for each of ``PARTS`` parts of ``PART`` columns.
    """
    K: tl.constexpr = EXTENTS.K
    column = tl.arange(0, ROOM)
    # All loads first: they are under way together.
    rows = ()
    for part in tl.static_range(PARTS):
        for choice in tl.static_range(K):
            at = y + tl.cast(places[choice], tl.int64) * EXTENTS.H + (first + part * PART + column)
            rows += (tl.load(at, mask=(column < PART) & (places[choice] >= 0), other=0),)
    totals = ()
    for part in tl.static_range(PARTS):
        total = tl.zeros((ROOM,), dtype=tl.float32)
        for choice in tl.static_range(K):
            row = rows[part * K + choice].to(tl.float32)
            if WEIGHTS != UNWEIGHTED:
                row *= weights[choice]
            total += row
        totals += (total,)
    return totals


@triton.jit
def message(slot, expert_rank, token, SUM: tl.constexpr, EXTENTS: tl.constexpr):
    """Where the slice of a rank's sum of a token is, ``SUM`` words."""
    number = tl.cast(expert_rank * EXTENTS.M + token, tl.int64)
    return slot.partials + (number * EXTENTS.SPLIT + slice_of(EXTENTS)) * SUM


@triton.jit
def send_sums(
    ctx,
    slot,
    y,
    places,
    token,
    source,
    call,
    element: tl.constexpr,
    WEIGHTS: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    ROOM: tl.constexpr,
    EXTENTS: tl.constexpr,
):
    """Step 2, for a token of rank ``source``."""
    ROUND: tl.constexpr = PARTS * PART
    SUM: tl.constexpr = pitch_of(EXTENTS.COLUMNS, element)
    number = source * EXTENTS.M + token
    base = tl.load(ctx.table + source)
    rows, any_here = load_places(places + number * EXTENTS.K, EXTENTS)
    weights = load_weights(slot.weights, number, rows, EXTENTS=EXTENTS)
    if any_here:
        if WEIGHTS == GIVEN:
            weights = receive_weights(ctx, slot, rows, number=number, source=source, call=call, EXTENTS=EXTENTS)
        target = message(slot, ctx.cur_rank, token, SUM=SUM, EXTENTS=EXTENTS)
        for round in range(EXTENTS.COLUMNS // ROUND):
            first = slice_of(EXTENTS) * EXTENTS.COLUMNS + round * ROUND
            totals = add_up(
                y, rows, weights, first, WEIGHTS=WEIGHTS, PARTS=PARTS, PART=PART, ROOM=ROOM, EXTENTS=EXTENTS
            )
            for part in tl.static_range(PARTS):
                to = target + round * pitch_of(ROUND, element) + pitch_of(part * PART, element)
                send(ctx, to, totals[part].to(element), count=PART, peer=source, base=base)


@triton.jit
def receive_sums(
    ctx,
    slot,
    y,
    places,
    topk_weights,
    out,
    bias,
    statistics,
    token,
    WEIGHTS: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    ROOM: tl.constexpr,
    EXTENTS: tl.constexpr,
):
    """Step 3, for an own token."""
    W: tl.constexpr = EXTENTS.W
    element: tl.constexpr = out.dtype.element_ty
    ROUND: tl.constexpr = PARTS * PART
    SUM: tl.constexpr = pitch_of(EXTENTS.COLUMNS, element)
    rank, k = ctx.cur_rank, choices(EXTENTS)
    number = rank * EXTENTS.M + token
    # Written by this rank's dispatch.
    word = tl.load(slot.choices + number * EXTENTS.K + k, mask=k < EXTENTS.K, other=-1).to(tl.int32)
    owner = owners(tl.where(word >= 0, word >> EXPERT, -1), EXTENTS)
    rows, _any_here = load_places(places + number * EXTENTS.K, EXTENTS)
    if WEIGHTS == GIVEN:
        weights = load_weights(topk_weights, token, rows, EXTENTS=EXTENTS)
    else:
        weights = load_weights(slot.weights, number, rows, EXTENTS=EXTENTS)
    for round in range(EXTENTS.COLUMNS // ROUND):
        first = slice_of(EXTENTS) * EXTENTS.COLUMNS + round * ROUND
        own = add_up(y, rows, weights, first, WEIGHTS=WEIGHTS, PARTS=PARTS, PART=PART, ROOM=ROOM, EXTENTS=EXTENTS)
        # Before the sums are waited for.
        column = tl.arange(0, ROOM)
        begin_of_row = tl.cast(token, tl.int64) * EXTENTS.H + first
        totals, to_add = (), ()
        for part in tl.static_range(PARTS):
            totals += (tl.zeros((ROOM,), dtype=tl.float32),)
            to_add += (load_bias(bias, begin_of_row + part * PART + column, column < PART),)
        for expert_rank in tl.static_range(W):
            comes = any_is(owner, expert_rank) & (expert_rank != rank)
            begin = message(slot, expert_rank, token, SUM=SUM, EXTENTS=EXTENTS) + round * pitch_of(ROUND, element)
            count = tl.where(comes, PART, 0)
            begun = begin_wait(statistics)
            parts = receive(ctx, begin, count, source=expert_rank, PARTS=PARTS, NUMBER=PART, ROOM=ROOM, element=element)
            end_combine_wait(statistics, expert_rank, begun)
            sums = ()
            for part in tl.static_range(PARTS):
                other = tl.where(comes, parts[part].to(tl.float32), 0)
                # A sum is never -0 here, so that 0 changes nothing.
                sums += (totals[part] + tl.where(expert_rank == rank, own[part], other),)
            totals = sums
        for part in tl.static_range(PARTS):
            total = add_bias(totals[part], to_add[part])
            at = out + tl.cast(token, tl.int64) * EXTENTS.H + (first + part * PART + column)
            tl.store(at, total.to(element), mask=column < PART)
    # Threads clear what others have read.
    cta_sync()
    for expert_rank in range(EXTENTS.W):
        if any_is(owner, expert_rank) & (expert_rank != rank):
            received = message(slot, expert_rank, token, SUM=SUM, EXTENTS=EXTENTS)
            clear(received, WORDS=SUM, ROOM=EXTENTS.CLEARED)


@triton.jit
def combine(
    slot,
    y,
    topk_weights,
    places,
    out,
    bias,
    statistics,
    WEIGHTS: tl.constexpr,
    PHASE: tl.constexpr,
    EXTENTS: tl.constexpr,
):
    """As `iris.experts.combine.combine`, but for ``slot`` and ``EXTENTS``: `LowLatencySlot` and `FewTokens`."""
    ctx = DeviceContext.initialize(slot.context, num_ranks=EXTENTS.W)
    gdc_wait()
    rank, program = ctx.cur_rank, tl.program_id(0)
    element: tl.constexpr = out.dtype.element_ty
    AT_ONCE: tl.constexpr = EXTENTS.PROGRAMS // EXTENTS.SPLIT
    OF_SLICE: tl.constexpr = parts_of(EXTENTS.COLUMNS, element, EXTENTS.THREADS)
    PARTS: tl.constexpr = parts_together(OF_SLICE, EXTENTS.K)
    PART: tl.constexpr = EXTENTS.COLUMNS // OF_SLICE
    ROOM: tl.constexpr = room_of(PART, element, EXTENTS.WORDS)
    # The number of the dispatch, which is over.
    call, tokens = tl.load(slot.calls + program), tl.load(slot.tokens)
    first = program // EXTENTS.SPLIT
    if PHASE != RECEIVE:
        if program == 0:
            announce_end(ctx, slot, call, EXTENTS=EXTENTS)
        if (WEIGHTS == GIVEN) & (slice_of(EXTENTS) == 0):
            for token in range(first, EXTENTS.M, AT_ONCE):
                send_weights(
                    ctx,
                    slot,
                    topk_weights,
                    token=token,
                    tokens=tokens,
                    call=call,
                    EXTENTS=EXTENTS,
                )
        for distance in range(1, EXTENTS.W):
            source = (rank + distance) % EXTENTS.W
            for token in range(first, EXTENTS.M, AT_ONCE):
                send_sums(
                    ctx,
                    slot,
                    y,
                    places=places,
                    token=token,
                    source=source,
                    call=call,
                    element=element,
                    WEIGHTS=WEIGHTS,
                    PARTS=PARTS,
                    PART=PART,
                    ROOM=ROOM,
                    EXTENTS=EXTENTS,
                )
    if PHASE != SEND:
        for token in range(first, tokens, AT_ONCE):
            receive_sums(
                ctx,
                slot,
                y,
                places=places,
                topk_weights=topk_weights,
                out=out,
                bias=bias,
                statistics=statistics,
                token=token,
                WEIGHTS=WEIGHTS,
                PARTS=PARTS,
                PART=PART,
                ROOM=ROOM,
                EXTENTS=EXTENTS,
            )
        if program == 0:
            await_ends(ctx, slot, call, statistics=statistics, EXTENTS=EXTENTS)
