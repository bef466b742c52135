"""Where rows go, in dispatch for few tokens: how a program finds the places of its tokens' rows, and brings them there.

Steps 2 and 3 of `iris.experts.low_latency.dispatch`.
"""

import triton
import triton.language as tl

from iris.experts.low_latency.messages import clear, parts_of, pitch_of, receive, room_of
from iris.experts.routing import choices
from iris.experts.statistics import begin_wait, count_rows, end_dispatch_wait
from iris.language.address import translate
from iris.language.fences import cta_sync
from iris.language.ll import ll_send
from iris.language.ll_poll import ll_recv_shared
from iris.language.ordering import load_relaxed

# A word of ``choices``: -1 for none, or the number of the rank's tokens before that have made the choice, and the
# expert from this bit on.
EXPERT = tl.constexpr(16)
NUMBER = tl.constexpr((1 << 16) - 1)
# In calls of these numbers, in their low 16 bits, words get a stamp that others may not write: see "Stamps" in
# `iris.experts.low_latency.memory`.
REFRESHED = tl.constexpr(2)


@triton.jit
def slice_of(EXTENTS: tl.constexpr):
    """The number of this program among those that share a token."""
    return tl.program_id(0) % EXTENTS.SPLIT


@triton.constexpr_function
def factors_of(form, extents):
    """Factors of a slice; that of a row alone belongs to the first one."""
    return max(1, form.SCALES // extents.SPLIT) if form.SCALES else 0


@triton.constexpr_function
def lanes_of_slice(form, extents):
    return 1 << (max(1, form.SCALES // extents.SPLIT) - 1).bit_length()


@triton.jit
def first_factor(FORM: tl.constexpr, EXTENTS: tl.constexpr):
    """The number of this program's, among those of a row."""
    return slice_of(EXTENTS) * factors_of(FORM, EXTENTS)


@triton.jit
def factors_of_slice(FORM: tl.constexpr, EXTENTS: tl.constexpr):
    """How many this program has."""
    return tl.where(first_factor(FORM, EXTENTS) < FORM.SCALES, factors_of(FORM, EXTENTS), 0)


@triton.jit
def regions(slot, number, element: tl.constexpr, FORM: tl.constexpr, EXTENTS: tl.constexpr):
    """Where this program's slice of row ``number`` of all ranks' is in ``rows``, and its factors, after all rows."""
    SLICE: tl.constexpr = pitch_of(EXTENTS.COLUMNS, element)
    FACTORS: tl.constexpr = pitch_of(factors_of(FORM, EXTENTS), tl.float32)
    each = tl.cast(number, tl.int64) * EXTENTS.SPLIT + slice_of(EXTENTS)
    return slot.rows + each * SLICE, slot.rows + EXTENTS.W * EXTENTS.M * EXTENTS.SPLIT * SLICE + each * FACTORS


@triton.jit
def rows_before(slot, source, local, mask, EXTENTS: tl.constexpr):
    """Rows of ranks before ``source`` for each of the local experts, whose numbers are there."""
    W: tl.constexpr = EXTENTS.W
    found = tl.zeros_like(local)
    for rank in tl.static_range(W):
        before = mask & (rank < source)
        word = load_relaxed(slot.counts + rank * EXTENTS.LOCAL + local, before)
        found += tl.where(before, word.to(tl.int32), 0)
    return found


@triton.jit
def first_rows(slot, layout, statistics, token, alignment, EXTENTS: tl.constexpr):
    """Where the rows of local experts begin, in memory of this program, where that depends on how many come.

    The first program, with token 0, also says how many there are, and where they begin.
    """
    reports = (token == 0) & (slice_of(EXTENTS) == 0)
    expert = tl.arange(0, EXTENTS.LOCALS)
    here = expert < EXTENTS.LOCAL
    begins = slot.begins + tl.program_id(0) * EXTENTS.LOCAL
    if (alignment > 0) | reports:
        total = rows_before(slot, EXTENTS.W, expert, mask=here, EXTENTS=EXTENTS)
        begin = expert * (EXTENTS.W * EXTENTS.M)
        end = begin + EXTENTS.W * EXTENTS.M
        if alignment > 0:
            rows = (total + alignment - 1) // alignment * alignment
            end = tl.cumsum(tl.where(here, rows, 0), axis=0)
            begin = end - rows
            tl.store(begins + expert, begin, mask=here)
            cta_sync()
        if reports:
            tl.store(layout.counts + expert, total, mask=here)
            tl.store(layout.offsets + expert, begin, mask=here)
            tl.store(layout.offsets + 1 + expert, end, mask=expert == EXTENTS.LOCAL - 1)
            count_rows(statistics, expert, total, here)
    return begins


@triton.jit
def find_places(ctx, slot, layout, statistics, token, alignment, call, EXTENTS: tl.constexpr):
    """Step 2: which row each choice of a token of every rank is, -1 for none here, to memory of this program.

    The first program of the token stores them to ``layout.places`` as well, and gets the same as a block, with where
    they are in ``[W, M, K]``, for the weights.
    """
    i = tl.arange(0, EXTENTS.AWAITED)
    counting, local = i // EXTENTS.LOCALS, i % EXTENTS.LOCALS
    counted = (counting < EXTENTS.W) & (local < EXTENTS.LOCAL)
    source, k = i // EXTENTS.CHOICES, i % EXTENTS.CHOICES
    there = (source < EXTENTS.W) & (k < EXTENTS.K)
    at = (source * EXTENTS.M + token) * EXTENTS.K + k
    ptrs = (slot.counts + counting * EXTENTS.LOCAL + local, slot.choices + at)
    if statistics is not None:
        # One rank after the other, so that the time of each wait is that of one rank. Each thread waits for its own
        # words, and one takes the time: when all threads have theirs.
        W: tl.constexpr = EXTENTS.W
        for rank in tl.static_range(W):
            begun = begin_wait(statistics)
            masks = (counted & (counting == rank), there & (source == rank))
            ll_recv_shared(ptrs, call, masks, sources=(counting, source), record=ctx._record())
            cta_sync()
            end_dispatch_wait(statistics, rank, begun)
    _, word = ll_recv_shared(ptrs, call, (counted, there), sources=(counting, source), record=ctx._record())
    # What any thread has awaited all may load.
    cta_sync()
    begins = first_rows(slot, layout, statistics, token, alignment=alignment, EXTENTS=EXTENTS)
    chosen = (word >> EXPERT) - ctx.cur_rank * EXTENTS.LOCAL
    here = there & (word >= 0) & (chosen >= 0) & (chosen < EXTENTS.LOCAL)
    start = chosen * (EXTENTS.W * EXTENTS.M)
    if alignment > 0:
        start = tl.load(begins + chosen, mask=here, other=0)
    before = rows_before(slot, source, chosen, mask=here, EXTENTS=EXTENTS)
    place = tl.where(here, start + before + (word & NUMBER), -1)
    tl.store(slot.found + tl.program_id(0) * (EXTENTS.W * EXTENTS.K) + source * EXTENTS.K + k, place, mask=there)
    tl.store(layout.places + at, place, mask=there & (slice_of(EXTENTS) == 0))
    cta_sync()
    return place, at


@triton.jit
def load_places(places, EXTENTS: tl.constexpr):
    """The rows of a token, a number for each choice; -1 for none here. And whether there is any."""
    K: tl.constexpr = EXTENTS.K
    found, most = (), -1
    for choice in tl.static_range(K):
        found += (tl.load(places + choice),)
        most = tl.maximum(most, found[choice])
    return found, most >= 0


@triton.jit
def load_found(slot, source, EXTENTS: tl.constexpr):
    """`load_places` of what this program has found for its token of rank ``source``."""
    return load_places(slot.found + (tl.program_id(0) * EXTENTS.W + source) * EXTENTS.K, EXTENTS)


@triton.jit
def store_to_places(rows, data, places, begin, count, end, WIDTH: tl.constexpr, K: tl.constexpr):
    """Store ``count`` elements, those from ``begin`` on and before ``end`` of a row of ``WIDTH``, to each of the rows
    ``places`` that is one.

    The row of an expert that was chosen twice is stored twice.
    """
    column = tl.arange(0, data.shape[0])
    for choice in tl.static_range(K):
        at = rows + tl.cast(places[choice], tl.int64) * WIDTH + (begin + column)
        tl.store(at, data, mask=(column < count) & (begin + column < end) & (places[choice] >= 0))


@triton.jit
def place_own_slice(ctx, slot, scales, layout, blocks, factors, FORM: tl.constexpr, EXTENTS: tl.constexpr):
    BLOCK: tl.constexpr = EXTENTS.BLOCK
    SCALES: tl.constexpr = FORM.SCALES
    places, any_here = load_found(slot, ctx.cur_rank, EXTENTS)
    first = slice_of(EXTENTS) * EXTENTS.COLUMNS
    if any_here:
        for i in tl.static_range(len(blocks)):
            store_to_places(
                layout.rows,
                blocks[i],
                places,
                begin=first + i * BLOCK,
                count=BLOCK,
                end=first + EXTENTS.COLUMNS,
                WIDTH=EXTENTS.H,
                K=EXTENTS.K,
            )
        if SCALES > 0:
            OF_BLOCK: tl.constexpr = BLOCK // FORM.GROUP if len(factors) > 1 else factors_of(FORM, EXTENTS)
            first = first_factor(FORM, EXTENTS)
            for i in tl.static_range(len(factors)):
                store_to_places(
                    scales.placed,
                    factors[i],
                    places,
                    begin=first + i * OF_BLOCK,
                    count=OF_BLOCK,
                    end=first + factors_of_slice(FORM, EXTENTS),
                    WIDTH=SCALES,
                    K=EXTENTS.K,
                )


@triton.jit
def place_slice(ctx, slot, scales, layout, statistics, token, source, FORM: tl.constexpr, EXTENTS: tl.constexpr):
    """Of a token of another rank: wait for it, store it, clear the message."""
    SCALES: tl.constexpr = FORM.SCALES
    COLUMNS: tl.constexpr = EXTENTS.COLUMNS
    element: tl.constexpr = layout.rows.dtype.element_ty
    PARTS: tl.constexpr = parts_of(COLUMNS, element, EXTENTS.THREADS)
    PART: tl.constexpr = COLUMNS // PARTS
    ROOM: tl.constexpr = room_of(PART, element, EXTENTS.WORDS)
    places, any_here = load_found(slot, source, EXTENTS)
    if any_here:
        first = slice_of(EXTENTS) * COLUMNS
        row, factors = regions(slot, source * EXTENTS.M + token, element, FORM=FORM, EXTENTS=EXTENTS)
        begun = begin_wait(statistics)
        parts = receive(ctx, row, PART, source=source, PARTS=PARTS, NUMBER=PART, ROOM=ROOM, element=element)
        end_dispatch_wait(statistics, source, begun)
        for part in tl.static_range(PARTS):
            store_to_places(
                layout.rows,
                parts[part],
                places,
                begin=first + part * PART,
                count=PART,
                end=first + COLUMNS,
                WIDTH=EXTENTS.H,
                K=EXTENTS.K,
            )
        if SCALES > 0:
            OF_SLICE: tl.constexpr = factors_of(FORM, EXTENTS)
            LANES: tl.constexpr = room_of(OF_SLICE, tl.float32, EXTENTS.WORDS)
            count = factors_of_slice(FORM, EXTENTS)
            (data,) = receive(
                ctx, factors, count, source=source, PARTS=1, NUMBER=OF_SLICE, ROOM=LANES, element=tl.float32
            )
            begin = first_factor(FORM, EXTENTS)
            store_to_places(
                scales.placed,
                data,
                places,
                begin=begin,
                count=OF_SLICE,
                end=begin + count,
                WIDTH=SCALES,
                K=EXTENTS.K,
            )
        # Threads clear what others have read.
        cta_sync()
        clear(row, WORDS=pitch_of(COLUMNS, element), ROOM=EXTENTS.CLEARED)
        if SCALES > 0:
            clear(factors, WORDS=pitch_of(OF_SLICE, tl.float32), ROOM=LANES)


@triton.jit
def receive_weights(ctx, slot, place, at, call, EXTENTS: tl.constexpr):
    """Of the choices with a row here: for this rank's combine."""
    source = tl.arange(0, EXTENTS.AWAITED) // EXTENTS.CHOICES
    (word,) = ll_recv_shared((slot.sent + at,), call, (place >= 0,), sources=(source,), record=ctx._record())
    tl.store(slot.weights + at, word.to(tl.float32, bitcast=True), mask=place >= 0)


@triton.jit
def refresh_stamps(ctx, slot, token, call, EXTENTS: tl.constexpr):
    """Of the words that this rank's combines write to other ranks, of an own token: what they read there is over."""
    W: tl.constexpr = EXTENTS.W
    k = choices(EXTENTS)
    given = slot.given + (ctx.cur_rank * EXTENTS.M + token) * EXTENTS.K
    for distance in tl.static_range(1, W):
        base = tl.load(ctx.table + (ctx.cur_rank + distance) % EXTENTS.W)
        ll_send(translate(given, ctx.base, base) + k, 0 * k, call - 1, k < EXTENTS.K)
        over = translate(slot.over + ctx.cur_rank, ctx.base, base)
        ll_send(over + 0 * k, 0 * k, call - 1, (k == 0) & (token == 0))


@triton.jit
def end_token(
    ctx,
    slot,
    scales,
    layout,
    statistics,
    token,
    weighted,
    alignment,
    call,
    blocks,
    factors,
    FORM: tl.constexpr,
    EXTENTS: tl.constexpr,
):
    """Steps 2 and 3 for a token of every rank. ``blocks`` and ``factors``: the own one's slice."""
    place, at = find_places(
        ctx, slot, layout, statistics=statistics, token=token, alignment=alignment, call=call, EXTENTS=EXTENTS
    )
    if ((call & 0xFFFF) < REFRESHED) & (slice_of(EXTENTS) == 0):
        refresh_stamps(ctx, slot, token, call=call, EXTENTS=EXTENTS)
    if FORM.MOVES:
        place_own_slice(ctx, slot, scales, layout=layout, blocks=blocks, factors=factors, FORM=FORM, EXTENTS=EXTENTS)
        for distance in range(1, EXTENTS.W):
            source = (ctx.cur_rank + distance) % EXTENTS.W
            place_slice(
                ctx,
                slot,
                scales,
                layout=layout,
                statistics=statistics,
                token=token,
                source=source,
                FORM=FORM,
                EXTENTS=EXTENTS,
            )
    if (weighted != 0) & (slice_of(EXTENTS) == 0):
        receive_weights(ctx, slot, place, at=at, call=call, EXTENTS=EXTENTS)
