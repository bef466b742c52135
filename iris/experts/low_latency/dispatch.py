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
   to its experts' places, and clears the message. Own rows are read once more where they are.

Nothing is waited for in step 1, so it is over on every rank whose programs are resident; there are fewer of these than
multiprocessors. Who writes which word, and why it may be written again: `iris.experts.low_latency.memory`.
"""

import triton
import triton.language as tl

from iris.experts.low_latency.messages import base_of, clear, pitch_of, receive, send
from iris.experts.routing import any_is, choices, load_choices, load_experts, owners
from iris.experts.rows import BY_BLOCK, NOT, SMALLEST, divide_blocks, row_factor
from iris.language.address import translate
from iris.language.context import DeviceContext
from iris.language.dependent_launch import gdc_wait
from iris.language.ll import ll_send
from iris.language.ll_poll import ll_recv_shared
from iris.language.ordering import signed_type, store_after_sync

# A word of ``choices``: -1 for none, or the token's number among those of its rank that have made the choice; a bit for
# a choice that the token has made before; and the expert.
AGAIN = tl.constexpr(1 << 15)
EXPERT = tl.constexpr(16)
# In calls of these numbers, in their low 16 bits, weights are sent in any case: see "Stamps" in
# `iris.experts.low_latency.memory`.
REFRESHED = tl.constexpr(2)


@triton.jit
def count_choices(topk_ids, targets, token, tokens, limit, EXTENTS: tl.constexpr):
    """How many tokens before ``limit``, by target, have chosen the expert; with `AGAIN`, if the token has twice.

    ``targets``: experts, of which the first K are the choices of ``token``.
    """
    TOKENS: tl.constexpr = EXTENTS.TOKENS
    TARGETS: tl.constexpr = EXTENTS.TARGETS
    target = tl.arange(0, TARGETS)
    found = tl.zeros((TARGETS,), dtype=tl.int32)
    for begin in range(0, EXTENTS.M, TOKENS):
        other = begin + tl.arange(0, TOKENS)[:, None]
        chosen = tl.zeros((TOKENS, TARGETS), dtype=tl.int32)
        again = tl.zeros((TOKENS, TARGETS), dtype=tl.int32)
        for k in tl.static_range(EXTENTS.K):
            experts = load_experts(topk_ids + other * EXTENTS.K + k, other < tokens, EXTENTS)
            # A target that is none is like choices that are none, and its number matters to nobody.
            same = (experts == targets[None, :]).to(tl.int32)
            chosen = chosen | same
            again = again | tl.where((k < target)[None, :], same, 0)
        there = tl.where(other < limit[None, :], chosen, 0)
        twice = tl.where((other == token) & (target < EXTENTS.K)[None, :], again * AGAIN, 0)
        found += tl.sum(there + twice, axis=0)
    return found


@triton.jit
def send_choices(ctx, slot, topk_ids, topk_weights, token, tokens, weighted, call, EXTENTS: tl.constexpr):
    """Of one token, and the numbers of rows of this program's share of the experts."""
    rank, K = ctx.cur_rank, EXTENTS.K
    target = tl.arange(0, EXTENTS.TARGETS)
    mine = target < K
    own = load_experts(topk_ids + token * K + target, mine & (token < tokens), EXTENTS)
    expert = tl.program_id(0) * EXTENTS.SHARE + target - K
    counted = (target >= K) & (target < K + EXTENTS.SHARE) & (expert < EXTENTS.E)
    targets = tl.where(mine, own, tl.where(counted, expert, -1))
    number = count_choices(topk_ids, targets, token, tokens, tl.where(mine, token, tokens), EXTENTS=EXTENTS)
    word = tl.where(own >= 0, number | (own << EXPERT), -1)
    region = (rank * EXTENTS.M + token) * K
    for distance in tl.static_range(EXTENTS.W):
        peer = (rank + distance) % EXTENTS.W
        base = base_of(ctx, peer)
        ll_send(translate(slot.choices + region, ctx.base, base) + target, word, call, mine)
    # Of the experts of all ranks, each where it is.
    counted &= token == tl.program_id(0)
    peer = tl.where(counted, expert // EXTENTS.LOCAL, rank)
    at = slot.counts + rank * EXTENTS.LOCAL + expert - peer * EXTENTS.LOCAL
    ll_send(translate(at, ctx.base, base_of(ctx, peer)), number, call, counted)
    if (weighted != 0) | ((call & 0xFFFF) < REFRESHED):
        k = choices(EXTENTS)
        given = (weighted != 0) & (token < tokens) & (k < K)
        weights = tl.load(topk_weights + token * K + k, mask=given, other=0).to(tl.int32, bitcast=True)
        for distance in tl.static_range(EXTENTS.W):
            base = base_of(ctx, (rank + distance) % EXTENTS.W)
            ll_send(translate(slot.sent + region, ctx.base, base) + k, weights, call, k < K)


@triton.jit
def load_block(x, token, begin, there, EXTENTS: tl.constexpr):
    column = begin + tl.arange(0, EXTENTS.BLOCK)
    at = x + tl.cast(token, tl.int64) * EXTENTS.H + column
    return tl.load(at, mask=(column < EXTENTS.H) & there, other=0)


@triton.jit
def factor_of_row(x, token, data, FORM: tl.constexpr, EXTENTS: tl.constexpr):
    """`row_factor`. ``data``: the first block of the row, float32."""
    if EXTENTS.H <= EXTENTS.BLOCK:
        return tl.maximum(tl.max(tl.abs(data), axis=0) / FORM.LARGEST, SMALLEST)
    else:
        return row_factor(x + tl.cast(token, tl.int64) * EXTENTS.H, FORM, EXTENTS)


@triton.jit
def divide(data, factor, element: tl.constexpr, FORM: tl.constexpr):
    """A block of a row as ``element``, and its factors; ``factor``: of the row, if it has one."""
    data = data.to(tl.float32)
    if FORM.QUANTIZE == BY_BLOCK:
        return divide_blocks(data, element, FORM)
    else:
        return (data / factor).to(element), factor + tl.zeros((4,), dtype=tl.float32)


@triton.jit
def regions(slot, number, element: tl.constexpr, FORM: tl.constexpr, EXTENTS: tl.constexpr):
    """Where row ``number`` of all ranks' regions is in ``rows``, and its factors, which are behind all rows."""
    ROW: tl.constexpr = pitch_of(EXTENTS.H, element)
    FACTORS: tl.constexpr = pitch_of(FORM.SCALES, tl.float32)
    begin = slot.rows + tl.cast(number, tl.int64) * ROW
    return begin, slot.rows + EXTENTS.W * EXTENTS.M * ROW + tl.cast(number, tl.int64) * FACTORS


@triton.jit
def send_row(ctx, slot, x, scales, topk_ids, token, first, element: tl.constexpr, FORM: tl.constexpr, EXTENTS: tl.constexpr):
    """To the other ranks of its experts, divided if it is to be. ``first``: the first block of the row."""
    SCALES: tl.constexpr = FORM.SCALES
    BLOCK: tl.constexpr = EXTENTS.BLOCK
    owner = owners(load_choices(topk_ids, token, EXTENTS), EXTENTS)
    row, factors = regions(slot, ctx.cur_rank * EXTENTS.M + token, element, FORM, EXTENTS)
    if FORM.QUANTIZE != NOT:
        factor = factor_of_row(x, token, first.to(tl.float32), FORM, EXTENTS)
    elif SCALES > 0:
        i = tl.arange(0, FORM.LANES)
        given = tl.load(scales.given + token * SCALES + i, mask=i < SCALES, other=0)
    for begin in tl.static_range(0, EXTENTS.H, BLOCK):
        data = first if begin == 0 else load_block(x, token, begin, True, EXTENTS)
        if FORM.QUANTIZE != NOT:
            data, of_block = divide(data, factor, element, FORM)
        for distance in tl.static_range(1, EXTENTS.W):
            peer = (ctx.cur_rank + distance) % EXTENTS.W
            base = base_of(ctx, peer)
            if any_is(owner, peer):
                at = row + pitch_of(begin, element)
                send(ctx, at, data, EXTENTS.H - begin, peer, base)
                if FORM.QUANTIZE == BY_BLOCK:
                    at = factors + begin // FORM.GROUP
                    send(ctx, at, of_block, SCALES - begin // FORM.GROUP, peer, base)
                elif SCALES > 0 and begin == 0:
                    send(ctx, factors, of_block if FORM.QUANTIZE != NOT else given, SCALES, peer, base)


@triton.jit
def first_rows(ctx, slot, layout, alignment, call, EXTENTS: tl.constexpr):
    """Step 2: where the rows of each rank begin for each local expert, ``[RANKS, LOCALS]``.

    ``alignment`` 0: each expert has room for all that may come. Else this depends on how many come.
    """
    RANKS: tl.constexpr = EXTENTS.RANKS
    LOCALS: tl.constexpr = EXTENTS.LOCALS
    i, expert = tl.arange(0, RANKS * LOCALS), tl.arange(0, LOCALS)
    source, local = i // LOCALS, i % LOCALS
    here = (source < EXTENTS.W) & (local < EXTENTS.LOCAL)
    at = slot.counts + source * EXTENTS.LOCAL + local
    counts = ll_recv_shared(at, call, here, source, record=ctx._record())
    counts = tl.reshape(tl.where(here, counts, 0), (RANKS, LOCALS))
    total = tl.sum(counts, axis=0)
    rows = tl.zeros((LOCALS,), dtype=tl.int32) + EXTENTS.W * EXTENTS.M
    if alignment > 0:
        rows = (total + alignment - 1) // alignment * alignment
    rows = tl.where(expert < EXTENTS.LOCAL, rows, 0)
    end = tl.cumsum(rows, axis=0)
    begin = end - rows
    if tl.program_id(0) == 0:
        tl.store(layout.counts + expert, total, mask=expert < EXTENTS.LOCAL)
        tl.store(layout.offsets + expert, begin, mask=expert < EXTENTS.LOCAL)
        tl.store(layout.offsets + EXTENTS.LOCAL, tl.max(end, axis=0))
    return begin[None, :] + tl.cumsum(counts, axis=0) - counts


@triton.jit
def receive_places(ctx, slot, layout, starts, token, call, EXTENTS: tl.constexpr):
    """Which row each choice of a token of every rank is, ``[RANKS, CHOICES]``; -1 for none here.

    And the same again, with -1 for a choice that the token has made before, whose row is there already.
    """
    RANKS: tl.constexpr = EXTENTS.RANKS
    CHOICES: tl.constexpr = EXTENTS.CHOICES
    i = tl.arange(0, RANKS * CHOICES)
    source, k = i // CHOICES, i % CHOICES
    there = (source < EXTENTS.W) & (k < EXTENTS.K)
    at = (source * EXTENTS.M + token) * EXTENTS.K + k
    word = ll_recv_shared(slot.choices + at, call, there, source, record=ctx._record())
    local = (word >> EXPERT) - ctx.cur_rank * EXTENTS.LOCAL
    here = there & (word >= 0) & (local >= 0) & (local < EXTENTS.LOCAL)
    index = tl.reshape(tl.where(here, local, 0), (RANKS, CHOICES))
    start = tl.reshape(tl.gather(starts, index, axis=1), (RANKS * CHOICES,))
    place = tl.where(here, start + (word & (AGAIN - 1)), -1)
    tl.store(layout.places + at, place, mask=there)
    copied = tl.where((word & AGAIN) != 0, -1, place)
    return place, copied


@triton.jit
def receive_weights(ctx, slot, place, token, call, EXTENTS: tl.constexpr):
    """Of the choices with a row here: for this rank's combine."""
    i = tl.arange(0, EXTENTS.RANKS * EXTENTS.CHOICES)
    source, k = i // EXTENTS.CHOICES, i % EXTENTS.CHOICES
    at = (source * EXTENTS.M + token) * EXTENTS.K + k
    word = ll_recv_shared(slot.sent + at, call, place >= 0, source, record=ctx._record())
    tl.store(slot.weights + at, word.to(tl.float32, bitcast=True), mask=place >= 0)


@triton.jit
def store_to_places(rows, data, places, begin, number: tl.constexpr, K: tl.constexpr):
    """Store a block of a row, of ``number`` elements, to each of the rows ``places`` that is one."""
    column = begin + tl.arange(0, data.shape[0])
    for choice in tl.static_range(K):
        if places[choice] >= 0:
            at = rows + tl.cast(places[choice], tl.int64) * number + column
            tl.store(at, data, mask=column < number)


@triton.jit
def rows_of(copied, source, EXTENTS: tl.constexpr):
    """The rows where a token of rank ``source`` goes, a number for each choice, and whether there is any."""
    i = tl.arange(0, EXTENTS.RANKS * EXTENTS.CHOICES)
    places = ()
    for choice in tl.static_range(EXTENTS.K):
        this = i == source * EXTENTS.CHOICES + choice
        places += (tl.sum(tl.where(this, copied + 1, 0), axis=0) - 1,)
    mine = i // EXTENTS.CHOICES == source
    return places, tl.max(tl.where(mine, copied, -1), axis=0) >= 0


@triton.jit
def place_own_row(x, scales, layout, token, copied, rank, FORM: tl.constexpr, EXTENTS: tl.constexpr):
    """It has gone nowhere: read, and divided, once more."""
    SCALES: tl.constexpr = FORM.SCALES
    QUANTIZE: tl.constexpr = FORM.QUANTIZE
    element: tl.constexpr = layout.rows.dtype.element_ty
    places, any_here = rows_of(copied, rank, EXTENTS)
    if any_here:
        first = load_block(x, token, 0, True, EXTENTS)
        if QUANTIZE != NOT:
            factor = factor_of_row(x, token, first.to(tl.float32), FORM, EXTENTS)
        for begin in tl.static_range(0, EXTENTS.H, EXTENTS.BLOCK):
            data = first if begin == 0 else load_block(x, token, begin, True, EXTENTS)
            if QUANTIZE != NOT:
                data, of_block = divide(data, factor, element, FORM)
                if QUANTIZE == BY_BLOCK:
                    store_to_places(scales.placed, of_block, places, begin // FORM.GROUP, SCALES, EXTENTS.K)
                elif begin == 0:
                    store_to_places(scales.placed, of_block, places, 0, SCALES, EXTENTS.K)
            store_to_places(layout.rows, data, places, begin, EXTENTS.H, EXTENTS.K)
        if QUANTIZE == NOT and SCALES > 0:
            i = tl.arange(0, FORM.LANES)
            given = tl.load(scales.given + token * SCALES + i, mask=i < SCALES, other=0)
            store_to_places(scales.placed, given, places, 0, SCALES, EXTENTS.K)


@triton.jit
def place_row(ctx, slot, scales, layout, token, copied, source, FORM: tl.constexpr, EXTENTS: tl.constexpr):
    """Of another rank: wait for it, store it, clear the message."""
    SCALES: tl.constexpr = FORM.SCALES
    BLOCK: tl.constexpr = EXTENTS.BLOCK
    element: tl.constexpr = layout.rows.dtype.element_ty
    places, any_here = rows_of(copied, source, EXTENTS)
    if any_here:
        row, factors = regions(slot, source * EXTENTS.M + token, element, FORM, EXTENTS)
        for begin in tl.static_range(0, EXTENTS.H, BLOCK):
            at = row + pitch_of(begin, element)
            data = receive(ctx, at, EXTENTS.H - begin, source, NUMBER=BLOCK, element=element)
            store_to_places(layout.rows, data, places, begin, EXTENTS.H, EXTENTS.K)
        if SCALES > 0:
            NUMBER: tl.constexpr = max(4, FORM.LANES, EXTENTS.WORDS)
            data = receive(ctx, factors, SCALES, source, NUMBER=NUMBER, element=tl.float32)
            store_to_places(scales.placed, data, places, 0, SCALES, EXTENTS.K)
            clear(factors, SCALES, NUMBER=NUMBER, element=tl.float32)
        for begin in tl.static_range(0, EXTENTS.H, BLOCK):
            clear(row + pitch_of(begin, element), EXTENTS.H - begin, NUMBER=BLOCK, element=element)


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
    gdc_wait()
    rank, program = ctx.cur_rank, tl.program_id(0)
    element: tl.constexpr = layout.rows.dtype.element_ty
    call = tl.load(slot.calls + program) + 1
    for token in range(program, EXTENTS.M, EXTENTS.PROGRAMS):
        # On its way while choices are counted.
        first = load_block(x, token, 0, FORM.MOVES & (token < tokens), EXTENTS)
        send_choices(ctx, slot, topk_ids, topk_weights, token, tokens, weighted, call, EXTENTS=EXTENTS)
        if FORM.MOVES and token < tokens:
            send_row(ctx, slot, x, scales, topk_ids, token, first, element=element, FORM=FORM, EXTENTS=EXTENTS)
    starts = first_rows(ctx, slot, layout, alignment, call, EXTENTS=EXTENTS)
    for token in range(program, EXTENTS.M, EXTENTS.PROGRAMS):
        place, copied = receive_places(ctx, slot, layout, starts, token, call, EXTENTS=EXTENTS)
        if FORM.MOVES:
            place_own_row(x, scales, layout, token, copied, rank, FORM=FORM, EXTENTS=EXTENTS)
            for distance in range(1, EXTENTS.W):
                source = (rank + distance) % EXTENTS.W
                place_row(ctx, slot, scales, layout, token, copied, source, FORM=FORM, EXTENTS=EXTENTS)
        if weighted != 0:
            receive_weights(ctx, slot, place, token, call, EXTENTS=EXTENTS)
    if program == 0:
        tl.store(slot.tokens, tl.cast(tokens, tl.int32))
    store_after_sync(slot.calls + program, call)
