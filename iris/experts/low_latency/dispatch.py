"""dispatch for few tokens: rows go to the ranks of their experts as messages that are their own flags.

Over the link, in one step, from each rank to each other: 8 K bytes a token for its choices, and as much for weights;
8 bytes for each expert there; a row for each token with an expert there, and its factors if it is of fp8. Results are
those of `iris.experts.dispatch`, but for the bits of NaNs. There a receiver waits for flags, of which each follows what
it stands for and is fenced from that; here nothing is behind anything else.

A receiver has to know how many rows an expert gets from the tokens before. Its own rank counts for each token how many
before it have chosen the same experts; and for each expert, all that have, by one of its programs. All are few: each
program compares its tokens' choices, and its share of the experts, with all choices of this rank.

Program p, for tokens t = p, p + P, ... of every rank:

1. It counts, and sends each choice of its own tokens, with the number of the rank's tokens before that have made the
   same choice, to all ranks, this one too; its share of the numbers of rows to the ranks of the experts; and rows to
   the other ranks. It does so also for tokens that this rank has not got, which have no choices.
2. It waits for the numbers of rows of all ranks, and then knows where those of each rank begin for each expert.
3. For its tokens of every rank it waits for the choices, and for the row if there is an expert here; it stores the row
   to its experts' places, and clears the message. Own rows have gone nowhere.

Nothing is waited for in step 1, so it is over on every rank whose programs are resident; there are fewer of these than
multiprocessors. Who writes which word, and why it may be written again: `iris.experts.low_latency.memory`.
"""

import triton
import triton.language as tl

from iris.experts.low_latency.messages import clear, parts_of, peers, pitch_of, receive, room_of, send
from iris.experts.routing import any_is, choices, load_experts, owners
from iris.experts.rows import BY_BLOCK, NOT, SMALLEST, divide_blocks
from iris.language.address import translate
from iris.language.context import DeviceContext
from iris.language.dependent_launch import gdc_wait
from iris.language.fences import block_barrier, cta_sync
from iris.language.ll import ll_send
from iris.language.ll_poll import ll_recv_shared
from iris.language.ordering import load_relaxed, store_after_sync

# A word of ``choices``: -1 for none, or the number of the rank's tokens before that have made the choice, and the
# expert from this bit on.
EXPERT = tl.constexpr(16)
NUMBER = tl.constexpr((1 << 16) - 1)
# In calls of these numbers, in their low 16 bits, weights are sent in any case: see "Stamps" in
# `iris.experts.low_latency.memory`.
REFRESHED = tl.constexpr(2)


@triton.jit
def count_choices(topk_ids, targets, tokens, limit, EXTENTS: tl.constexpr):
    """How many of this rank's tokens before ``limit`` have chosen each of the experts ``targets``."""
    TOKENS: tl.constexpr = EXTENTS.TOKENS
    TARGETS: tl.constexpr = EXTENTS.TARGETS
    found = tl.zeros((TARGETS,), dtype=tl.int32)
    for begin in range(0, EXTENTS.M, TOKENS):
        # Tokens along the second dimension, along which threads are: each loads the choices of its own.
        token = begin + tl.arange(0, TOKENS)[None, :]
        chosen = tl.zeros((TARGETS, TOKENS), dtype=tl.int1)
        for k in tl.static_range(EXTENTS.K):
            # A target that is none is like choices that are none, and its number matters to nobody.
            chosen |= load_experts(topk_ids + token * EXTENTS.K + k, token < tokens, EXTENTS) == targets[:, None]
        found += tl.sum((chosen & (token < limit[:, None])).to(tl.int32), axis=1)
    return found


@triton.jit
def send_choices(ctx, slot, topk_ids, own, token, tokens, call, bases, EXTENTS: tl.constexpr):
    """``own``: those of the token. And the numbers of rows of this program's share of the experts."""
    rank, K = ctx.cur_rank, EXTENTS.K
    target = tl.arange(0, EXTENTS.TARGETS)
    mine = target < K
    expert = tl.program_id(0) * EXTENTS.SHARE + target - K
    # With the first of its tokens.
    counted = (target >= K) & (target < K + EXTENTS.SHARE) & (expert < EXTENTS.E) & (token == tl.program_id(0))
    targets = tl.where(mine, own, tl.where(counted, expert, -1))
    number = count_choices(topk_ids, targets, tokens, tl.where(mine, token, tokens), EXTENTS=EXTENTS)
    word = tl.where(own >= 0, number | (own << EXPERT), -1)
    region = slot.choices + (rank * EXTENTS.M + token) * K
    at = slot.counts + rank * EXTENTS.LOCAL + expert
    for distance in tl.static_range(EXTENTS.W):
        peer = (rank + distance) % EXTENTS.W
        ll_send(translate(region, ctx.base, bases[distance]) + target, word, call, mine)
        first = peer * EXTENTS.LOCAL
        there = counted & (expert >= first) & (expert < first + EXTENTS.LOCAL)
        ll_send(translate(at - first, ctx.base, bases[distance]), number, call, there)


@triton.jit
def send_weights(ctx, slot, weights, token, weighted, call, bases, EXTENTS: tl.constexpr):
    """Of one token."""
    k = choices(EXTENTS)
    region = slot.sent + (ctx.cur_rank * EXTENTS.M + token) * EXTENTS.K
    wanted = (weighted != 0) | ((call & 0xFFFF) < REFRESHED)
    for distance in tl.static_range(EXTENTS.W):
        ll_send(translate(region, ctx.base, bases[distance]) + k, weights, call, (k < EXTENTS.K) & wanted)


@triton.jit
def load_row(x, scales, token, there, FORM: tl.constexpr, EXTENTS: tl.constexpr):
    """Its blocks, and its factors if they are given."""
    QUANTIZE: tl.constexpr = FORM.QUANTIZE
    SCALES: tl.constexpr = FORM.SCALES
    blocks, factors = (), ()
    for begin in tl.static_range(0, EXTENTS.H, EXTENTS.BLOCK):
        column = begin + tl.arange(0, EXTENTS.BLOCK)
        at = x + tl.cast(token, tl.int64) * EXTENTS.H + column
        blocks += (tl.load(at, mask=(column < EXTENTS.H) & there, other=0),)
    if QUANTIZE == NOT and SCALES > 0:
        i = tl.arange(0, FORM.LANES)
        factors += (tl.load(scales.given + token * SCALES + i, mask=(i < SCALES) & there, other=0),)
    return blocks, factors


@triton.jit
def divide_row(blocks, factors, element: tl.constexpr, FORM: tl.constexpr):
    """The same as it travels: by factors that are made of it, if it is to be divided. As `iris.experts.rows`."""
    QUANTIZE: tl.constexpr = FORM.QUANTIZE
    if QUANTIZE == NOT:
        return blocks, factors
    else:
        divided, made = (), ()
        if QUANTIZE != BY_BLOCK:
            peak = 0.0
            for i in tl.static_range(len(blocks)):
                peak = tl.maximum(peak, tl.max(tl.abs(blocks[i].to(tl.float32)), axis=0))
            factor = tl.maximum(peak / FORM.LARGEST, SMALLEST)
            made += (factor + tl.zeros((4,), dtype=tl.float32),)
        for i in tl.static_range(len(blocks)):
            data = blocks[i].to(tl.float32)
            if QUANTIZE == BY_BLOCK:
                data, of_block = divide_blocks(data, element, FORM)
                made += (of_block,)
            else:
                data = (data / factor).to(element)
            divided += (data,)
        return divided, made


@triton.jit
def regions(slot, number, element: tl.constexpr, FORM: tl.constexpr, EXTENTS: tl.constexpr):
    """Where row ``number`` of all ranks' regions is in ``rows``, and its factors, which are behind all rows."""
    ROW: tl.constexpr = pitch_of(EXTENTS.H, element)
    FACTORS: tl.constexpr = pitch_of(FORM.SCALES, tl.float32)
    begin = slot.rows + tl.cast(number, tl.int64) * ROW
    return begin, slot.rows + EXTENTS.W * EXTENTS.M * ROW + tl.cast(number, tl.int64) * FACTORS


@triton.jit
def send_row(
    ctx, slot, own, token, row, factors, bases, element: tl.constexpr, FORM: tl.constexpr, EXTENTS: tl.constexpr
):
    """To the other ranks of its experts ``own``."""
    owner = owners(own, EXTENTS)
    to_row, to_factors = regions(slot, ctx.cur_rank * EXTENTS.M + token, element, FORM, EXTENTS)
    for distance in tl.static_range(1, EXTENTS.W):
        peer = (ctx.cur_rank + distance) % EXTENTS.W
        if any_is(owner, peer):
            for i in tl.static_range(len(row)):
                count = EXTENTS.H - i * EXTENTS.BLOCK
                send(ctx, to_row + pitch_of(i * EXTENTS.BLOCK, element), row[i], count, peer, bases[distance])
            for i in tl.static_range(len(factors)):
                first = i * (EXTENTS.BLOCK // FORM.GROUP)
                send(ctx, to_factors + first, factors[i], FORM.SCALES - first, peer, bases[distance])


@triton.jit
def rows_before(slot, source, local, mask, EXTENTS: tl.constexpr):
    """Rows of ranks before ``source`` for each of the local experts, whose numbers are there."""
    found = tl.zeros_like(local)
    for rank in tl.static_range(EXTENTS.W):
        before = mask & (rank < source)
        word = load_relaxed(slot.counts + rank * EXTENTS.LOCAL + local, before)
        found += tl.where(before, word.to(tl.int32), 0)
    return found


@triton.jit
def first_rows(slot, layout, token, alignment, EXTENTS: tl.constexpr):
    """Where the rows of local experts begin, in memory of this program, where that depends on how many come.

    With token 0 it also says how many there are, and where they begin.
    """
    expert = tl.arange(0, EXTENTS.LOCALS)
    here = expert < EXTENTS.LOCAL
    begins = slot.begins + tl.program_id(0) * EXTENTS.LOCAL
    if (alignment > 0) | (token == 0):
        total = rows_before(slot, EXTENTS.W, expert, here, EXTENTS)
        begin = expert * (EXTENTS.W * EXTENTS.M)
        end = begin + EXTENTS.W * EXTENTS.M
        if alignment > 0:
            rows = (total + alignment - 1) // alignment * alignment
            end = tl.cumsum(tl.where(here, rows, 0), axis=0)
            begin = end - rows
            tl.store(begins + expert, begin, mask=here)
            cta_sync()
        if token == 0:
            tl.store(layout.counts + expert, total, mask=here)
            tl.store(layout.offsets + expert, begin, mask=here)
            tl.store(layout.offsets + 1 + expert, end, mask=expert == EXTENTS.LOCAL - 1)
    return begins


@triton.jit
def find_places(ctx, slot, layout, token, alignment, call, EXTENTS: tl.constexpr):
    """Step 2: which row each choice of a token of every rank is, -1 for none here, to ``layout.places``.

    Returns the same, and where it is there and in ``[W, M, K]`` of other memory.
    """
    i = tl.arange(0, EXTENTS.AWAITED)
    counting, local = i // EXTENTS.LOCALS, i % EXTENTS.LOCALS
    counted = (counting < EXTENTS.W) & (local < EXTENTS.LOCAL)
    source, k = i // EXTENTS.CHOICES, i % EXTENTS.CHOICES
    there = (source < EXTENTS.W) & (k < EXTENTS.K)
    at = (source * EXTENTS.M + token) * EXTENTS.K + k
    ptrs = (slot.counts + counting * EXTENTS.LOCAL + local, slot.choices + at)
    _, word = ll_recv_shared(ptrs, call, (counted, there), (counting, source), record=ctx._record())
    # What any thread has awaited all may load.
    cta_sync()
    begins = first_rows(slot, layout, token, alignment, EXTENTS=EXTENTS)
    chosen = (word >> EXPERT) - ctx.cur_rank * EXTENTS.LOCAL
    here = there & (word >= 0) & (chosen >= 0) & (chosen < EXTENTS.LOCAL)
    start = chosen * (EXTENTS.W * EXTENTS.M)
    if alignment > 0:
        start = tl.load(begins + chosen, mask=here, other=0)
    before = rows_before(slot, source, chosen, here, EXTENTS)
    place = tl.where(here, start + before + (word & NUMBER), -1)
    tl.store(layout.places + at, place, mask=there)
    cta_sync()
    return place, at


@triton.jit
def load_places(places, number, EXTENTS: tl.constexpr):
    """The rows of a token, a number for each choice; -1 for none here. ``number``: of the token, among all ranks'.

    And whether there is any.
    """
    found, most = (), -1
    for choice in tl.static_range(EXTENTS.K):
        found += (tl.load(places + number * EXTENTS.K + choice),)
        most = tl.maximum(most, found[choice])
    return found, most >= 0


@triton.jit
def store_to_places(rows, data, places, begin, count: tl.constexpr, number: tl.constexpr, K: tl.constexpr):
    """Store ``count`` elements of a row of ``number``, from ``begin`` on, to each of the rows ``places`` that is one.

    The row of an expert that was chosen twice is stored twice.
    """
    column = tl.arange(0, data.shape[0])
    for choice in tl.static_range(K):
        at = rows + tl.cast(places[choice], tl.int64) * number + (begin + column)
        tl.store(at, data, mask=(column < count) & (begin + column < number) & (places[choice] >= 0))


@triton.jit
def place_own_row(scales, layout, token, rank, row, factors, FORM: tl.constexpr, EXTENTS: tl.constexpr):
    places, any_here = load_places(layout.places, rank * EXTENTS.M + token, EXTENTS)
    if any_here:
        for i in tl.static_range(len(row)):
            store_to_places(layout.rows, row[i], places, i * EXTENTS.BLOCK, EXTENTS.BLOCK, EXTENTS.H, EXTENTS.K)
        BLOCK: tl.constexpr = EXTENTS.BLOCK // FORM.GROUP if len(factors) > 1 else FORM.SCALES
        for i in tl.static_range(len(factors)):
            store_to_places(scales.placed, factors[i], places, i * BLOCK, BLOCK, FORM.SCALES, EXTENTS.K)


@triton.jit
def place_row(ctx, slot, scales, layout, token, source, FORM: tl.constexpr, EXTENTS: tl.constexpr):
    """Of another rank: wait for it, store it, clear the message."""
    SCALES: tl.constexpr = FORM.SCALES
    element: tl.constexpr = layout.rows.dtype.element_ty
    H: tl.constexpr = EXTENTS.H
    PARTS: tl.constexpr = parts_of(H, element, EXTENTS.THREADS)
    ROOM: tl.constexpr = room_of(H // PARTS, element, EXTENTS.WORDS)
    places, any_here = load_places(layout.places, source * EXTENTS.M + token, EXTENTS)
    if any_here:
        row, factors = regions(slot, source * EXTENTS.M + token, element, FORM, EXTENTS)
        parts = receive(ctx, row, H // PARTS, source, PARTS=PARTS, NUMBER=H // PARTS, ROOM=ROOM, element=element)
        for part in tl.static_range(PARTS):
            store_to_places(layout.rows, parts[part], places, part * (H // PARTS), H // PARTS, H, EXTENTS.K)
        if SCALES > 0:
            OF_FACTORS: tl.constexpr = room_of(SCALES, tl.float32, EXTENTS.WORDS)
            (data,) = receive(ctx, factors, SCALES, source, PARTS=1, NUMBER=SCALES, ROOM=OF_FACTORS, element=tl.float32)
            store_to_places(scales.placed, data, places, 0, SCALES, SCALES, EXTENTS.K)
        # Threads clear what others have read.
        cta_sync()
        clear(row, WORDS=pitch_of(H, element), ROOM=EXTENTS.CLEARED)
        if SCALES > 0:
            clear(factors, WORDS=pitch_of(SCALES, tl.float32), ROOM=OF_FACTORS)


@triton.jit
def receive_weights(ctx, slot, place, at, call, EXTENTS: tl.constexpr):
    """Of the choices with a row here: for this rank's combine."""
    source = tl.arange(0, EXTENTS.AWAITED) // EXTENTS.CHOICES
    (word,) = ll_recv_shared((slot.sent + at,), call, (place >= 0,), (source,), record=ctx._record())
    tl.store(slot.weights + at, word.to(tl.float32, bitcast=True), mask=place >= 0)


@triton.jit
def begin_token(
    ctx,
    slot,
    x,
    scales,
    topk_ids,
    topk_weights,
    token,
    tokens,
    weighted,
    call,
    bases,
    element: tl.constexpr,
    FORM: tl.constexpr,
    EXTENTS: tl.constexpr,
):
    """Step 1 for an own token. Returns its row as it travels."""
    target, k = tl.arange(0, EXTENTS.TARGETS), choices(EXTENTS)
    given = (k < EXTENTS.K) & (token < tokens)
    row, factors = load_row(x, scales, token, FORM.MOVES & (token < tokens), FORM, EXTENTS)
    own = load_experts(topk_ids + token * EXTENTS.K + k, given, EXTENTS)
    weights = tl.load(topk_weights + token * EXTENTS.K + k, mask=given & (weighted != 0), other=0)
    at = topk_ids + token * EXTENTS.K + target
    own_targets = load_experts(at, (target < EXTENTS.K) & (token < tokens), EXTENTS)
    # The compiler leaves loads in front of a barrier of the block. So they are under way while choices are counted.
    block_barrier()
    send_choices(ctx, slot, topk_ids, own_targets, token, tokens, call, bases, EXTENTS=EXTENTS)
    send_weights(ctx, slot, weights.to(tl.int32, bitcast=True), token, weighted, call, bases, EXTENTS=EXTENTS)
    row, factors = divide_row(row, factors, element, FORM)
    if FORM.MOVES:
        send_row(ctx, slot, own, token, row, factors, bases, element=element, FORM=FORM, EXTENTS=EXTENTS)
    return row, factors


@triton.jit
def end_token(
    ctx,
    slot,
    scales,
    layout,
    token,
    weighted,
    alignment,
    call,
    row,
    factors,
    FORM: tl.constexpr,
    EXTENTS: tl.constexpr,
):
    """Steps 2 and 3 for a token of every rank. ``row`` and ``factors``: the own one's."""
    place, at = find_places(ctx, slot, layout, token, alignment, call, EXTENTS=EXTENTS)
    if FORM.MOVES:
        place_own_row(scales, layout, token, ctx.cur_rank, row, factors, FORM=FORM, EXTENTS=EXTENTS)
        for distance in range(1, EXTENTS.W):
            source = (ctx.cur_rank + distance) % EXTENTS.W
            place_row(ctx, slot, scales, layout, token, source, FORM=FORM, EXTENTS=EXTENTS)
    if weighted != 0:
        receive_weights(ctx, slot, place, at, call, EXTENTS=EXTENTS)


@triton.jit(do_not_specialize=["tokens", "weighted", "alignment"])
def dispatch(
    slot,
    x,
    scales,
    topk_ids,
    topk_weights,
    layout,
    tokens,
    weighted,
    alignment,
    FORM: tl.constexpr,
    EXTENTS: tl.constexpr,
):
    """As `iris.experts.dispatch.dispatch`, but for ``slot`` and ``EXTENTS``: `LowLatencySlot` and `FewTokens`."""
    ctx = DeviceContext.initialize(slot.context, num_ranks=EXTENTS.W)
    bases = peers(ctx, EXTENTS.W)
    gdc_wait()
    rank, program = ctx.cur_rank, tl.program_id(0)
    element: tl.constexpr = layout.rows.dtype.element_ty
    call = tl.load(slot.calls + program) + 1
    # A program that has one token keeps its row in registers.
    if EXTENTS.M <= EXTENTS.PROGRAMS:
        row, factors = begin_token(
            ctx, slot, x, scales, topk_ids, topk_weights, program, tokens, weighted, call, bases, element, FORM, EXTENTS
        )
        end_token(ctx, slot, scales, layout, program, weighted, alignment, call, row, factors, FORM, EXTENTS)
    else:
        for token in range(program, EXTENTS.M, EXTENTS.PROGRAMS):
            begin_token(
                ctx,
                slot,
                x,
                scales,
                topk_ids,
                topk_weights,
                token,
                tokens,
                weighted,
                call,
                bases,
                element,
                FORM,
                EXTENTS,
            )
        for token in range(program, EXTENTS.M, EXTENTS.PROGRAMS):
            row, factors = load_row(x, scales, token, FORM.MOVES & (token < tokens), FORM, EXTENTS)
            row, factors = divide_row(row, factors, element, FORM)
            end_token(ctx, slot, scales, layout, token, weighted, alignment, call, row, factors, FORM, EXTENTS)
    if program == 0:
        tl.store(slot.tokens, tl.cast(tokens, tl.int32))
    store_after_sync(slot.calls + program, call)
