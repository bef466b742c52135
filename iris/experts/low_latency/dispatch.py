"""dispatch for few tokens: rows go to the ranks of their experts as messages that are their own flags.

Over the link, in one step, from each rank to each other: 8 K bytes a token for its choices, and as much for weights;
8 bytes for each expert there; a row for each token with an expert there, and its factors if it is of fp8. Results are
those of `iris.experts.dispatch`, but for the bits of NaNs. There a receiver waits for flags, of which each follows what
it stands for and is fenced from that; here nothing is ordered after anything else.

A receiver has to know how many rows an expert gets from the tokens before. Its own rank counts for each token how many
before it have chosen the same experts; and for each expert, all that have, by one of its programs. All are few: each
program compares its tokens' choices, and its share of the experts, with all choices of this rank.

``SPLIT`` programs share a token, where there are fewer tokens than programs: each moves a slice of the row, so that few
tokens keep many multiprocessors' loads and stores under way. The first of them, of slice 0, does what is done once for
a token. With T tokens at a time, the programs of token t serve t, t + T, ... of every rank:

1. They count, and send: the first each choice of its own tokens, with the number of the rank's tokens before that have
   made the same choice, to all ranks, this one too; each its share of the numbers of rows to the ranks of the experts,
   and its slices of rows to the other ranks. They do so also for tokens that this rank has not got, which have no
   choices.
2. Each waits for the numbers of rows of all ranks, and then knows where those of each rank begin for each expert.
3. For its tokens of every rank it waits for the choices, and for its slice of the row if there is an expert here; it
   stores that to the experts' places, and clears the message. Own rows have gone nowhere.

Nothing is waited for in step 1, so it is over on every rank whose programs are resident; there are fewer of these than
multiprocessors. Step 1 and the others may be launches of their own, one after the other (``async_op=True``): then a
program loads its slices anew. Steps 2 and 3: `iris.experts.low_latency.placing`. Who writes which word, and why it may
be written again: `iris.experts.low_latency.memory`.
"""

import triton
import triton.language as tl

from iris.experts.low_latency.messages import peers, pitch_of, send
from iris.experts.low_latency.placing import (
    EXPERT,
    REFRESHED,
    end_token,
    factors_of_slice,
    first_factor,
    lanes_of_slice,
    regions,
    slice_of,
)
from iris.experts.routing import RECEIVE, SEND, WHOLE, any_is, choices, load_experts, owners, tokens_of
from iris.experts.rows import BY_BLOCK, NOT, SMALLEST, quantize_blocks
from iris.language.address import translate
from iris.language.context import DeviceContext
from iris.language.dependent_launch import gdc_wait
from iris.language.fences import block_barrier
from iris.language.ll import ll_send
from iris.language.ordering import store_after_sync


@triton.jit
def count_choices(topk_ids, targets, tokens, limit, EXTENTS: tl.constexpr):
    """How many of this rank's tokens before ``limit`` have chosen each of the experts ``targets``."""
    K: tl.constexpr = EXTENTS.K
    TOKENS: tl.constexpr = EXTENTS.TOKENS
    TARGETS: tl.constexpr = EXTENTS.TARGETS
    found = tl.zeros((TARGETS,), dtype=tl.int32)
    for begin in range(0, EXTENTS.M, TOKENS):
        # Tokens along the second dimension, along which threads are: each loads the choices of its own.
        token = begin + tl.arange(0, TOKENS)[None, :]
        chosen = tl.zeros((TARGETS, TOKENS), dtype=tl.int1)
        for k in tl.static_range(K):
            # A target that is none is like choices that are none, and its number matters to nobody.
            chosen |= load_experts(topk_ids + token * EXTENTS.K + k, token < tokens, EXTENTS) == targets[:, None]
        found += tl.sum((chosen & (token < limit[:, None])).to(tl.int32), axis=1)
    return found


@triton.jit
def send_choices(ctx, slot, topk_ids, own, token, tokens, call, bases, EXTENTS: tl.constexpr):
    """``own``: those of the token. And the numbers of rows of this program's share of the experts."""
    W: tl.constexpr = EXTENTS.W
    K: tl.constexpr = EXTENTS.K
    rank = ctx.cur_rank
    program, target = tl.program_id(0), tl.arange(0, EXTENTS.TARGETS)
    mine = (target < K) & (slice_of(EXTENTS) == 0)
    expert = program * EXTENTS.SHARE + target - K
    # With the first of its tokens.
    first = token == program // EXTENTS.SPLIT
    counted = (target >= K) & (target < K + EXTENTS.SHARE) & (expert < EXTENTS.E) & first
    targets = tl.where(mine, own, tl.where(counted, expert, -1))
    limit = tl.where(mine, token, tokens)
    number = count_choices(topk_ids, targets, tokens=tokens, limit=limit, EXTENTS=EXTENTS)
    word = tl.where(own >= 0, number | (own << EXPERT), -1)
    region = slot.choices + (rank * EXTENTS.M + token) * K
    at = slot.counts + rank * EXTENTS.LOCAL + expert
    for distance in tl.static_range(W):
        peer = (rank + distance) % EXTENTS.W
        ll_send(translate(region, ctx.base, bases[distance]) + target, word, call, mine)
        begin = peer * EXTENTS.LOCAL
        there = counted & (expert >= begin) & (expert < begin + EXTENTS.LOCAL)
        ll_send(translate(at - begin, ctx.base, bases[distance]), number, call, there)


@triton.jit
def send_weights(ctx, slot, weights, token, weighted, call, bases, EXTENTS: tl.constexpr):
    """Of one token."""
    W: tl.constexpr = EXTENTS.W
    k = choices(EXTENTS)
    region = slot.sent + (ctx.cur_rank * EXTENTS.M + token) * EXTENTS.K
    wanted = ((weighted != 0) | ((call & 0xFFFF) < REFRESHED)) & (slice_of(EXTENTS) == 0)
    for distance in tl.static_range(W):
        ll_send(translate(region, ctx.base, bases[distance]) + k, weights, call, (k < EXTENTS.K) & wanted)


@triton.jit
def load_slice(x, scales, token, there, FORM: tl.constexpr, EXTENTS: tl.constexpr):
    """This program's of the token's row: its blocks, and its factors if they are given."""
    BLOCK: tl.constexpr = EXTENTS.BLOCK
    QUANTIZE: tl.constexpr = FORM.QUANTIZE
    SCALES: tl.constexpr = FORM.SCALES
    COLUMNS: tl.constexpr = EXTENTS.COLUMNS
    blocks, factors = (), ()
    row = x + tl.cast(token, tl.int64) * EXTENTS.H + slice_of(EXTENTS) * COLUMNS
    for begin in tl.static_range(0, COLUMNS, BLOCK):
        column = begin + tl.arange(0, EXTENTS.BLOCK)
        blocks += (tl.load(row + column, mask=(column < COLUMNS) & there, other=0),)
    if QUANTIZE == NOT and SCALES > 0:
        i, count = tl.arange(0, lanes_of_slice(FORM, EXTENTS)), factors_of_slice(FORM, EXTENTS)
        at = scales.given + token * SCALES + first_factor(FORM, EXTENTS) + i
        factors += (tl.load(at, mask=(i < count) & there, other=0),)
    return blocks, factors


@triton.jit
def row_factor(x, token, there, blocks, FORM: tl.constexpr, EXTENTS: tl.constexpr):
    """Of the whole row, of which ``blocks`` are this program's slice."""
    H: tl.constexpr = EXTENTS.H
    BLOCK: tl.constexpr = EXTENTS.BLOCK
    SPLIT: tl.constexpr = EXTENTS.SPLIT
    peak = 0.0
    if SPLIT == 1:
        for i in tl.static_range(len(blocks)):
            peak = tl.maximum(peak, tl.max(tl.abs(blocks[i].to(tl.float32)), axis=0))
    else:
        # Each program of the token loads all of it, and they come to the same.
        row = x + tl.cast(token, tl.int64) * EXTENTS.H
        peaks = tl.zeros((BLOCK,), dtype=tl.float32)
        for begin in tl.static_range(0, H, BLOCK):
            column = begin + tl.arange(0, EXTENTS.BLOCK)
            data = tl.load(row + column, mask=(column < EXTENTS.H) & there, other=0)
            peaks = tl.maximum(peaks, tl.abs(data.to(tl.float32)))
        peak = tl.max(peaks, axis=0)
    return tl.maximum(peak / FORM.LARGEST, SMALLEST)


@triton.jit
def quantize_slice(x, token, there, blocks, factors, element: tl.constexpr, FORM: tl.constexpr, EXTENTS: tl.constexpr):
    """The slice as it travels, with its factors: quantized if it is to be, as by `iris.experts.rows`."""
    QUANTIZE: tl.constexpr = FORM.QUANTIZE
    if QUANTIZE == NOT:
        return blocks, factors
    else:
        quantized, made = (), ()
        if QUANTIZE != BY_BLOCK:
            factor = row_factor(x, token, there, blocks=blocks, FORM=FORM, EXTENTS=EXTENTS)
            made += (factor + tl.zeros((4,), dtype=tl.float32),)
        for i in tl.static_range(len(blocks)):
            data = blocks[i].to(tl.float32)
            if QUANTIZE == BY_BLOCK:
                # One row of a block.
                data, of_block = quantize_blocks(data[None, :], element, FORM)
                data, of_block = tl.reshape(data, (data.shape[1],)), tl.reshape(of_block, (of_block.shape[1],))
                made += (of_block,)
            else:
                data = (data / factor).to(element)
            quantized += (data,)
        return quantized, made


@triton.jit
def send_slice(
    ctx, slot, own, token, blocks, factors, bases, element: tl.constexpr, FORM: tl.constexpr, EXTENTS: tl.constexpr
):
    """To the other ranks of the token's experts ``own``."""
    W: tl.constexpr = EXTENTS.W
    BLOCK: tl.constexpr = EXTENTS.BLOCK
    owner = owners(own, EXTENTS)
    row, to_factors = regions(slot, ctx.cur_rank * EXTENTS.M + token, element, FORM=FORM, EXTENTS=EXTENTS)
    for distance in tl.static_range(1, W):
        peer = (ctx.cur_rank + distance) % EXTENTS.W
        if any_is(owner, peer):
            for i in tl.static_range(len(blocks)):
                to, count = row + pitch_of(i * BLOCK, element), EXTENTS.COLUMNS - i * BLOCK
                send(ctx, to, blocks[i], count=count, peer=peer, base=bases[distance])
            for i in tl.static_range(len(factors)):
                first = i * (BLOCK // FORM.GROUP)
                count = factors_of_slice(FORM, EXTENTS) - first
                send(ctx, to_factors + first, factors[i], count=count, peer=peer, base=bases[distance])


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
    """Step 1 for an own token. Returns its slice as it travels."""
    target, k = tl.arange(0, EXTENTS.TARGETS), choices(EXTENTS)
    exists = token < tokens
    given = (k < EXTENTS.K) & exists
    blocks, factors = load_slice(x, scales, token, there=FORM.MOVES & exists, FORM=FORM, EXTENTS=EXTENTS)
    own = load_experts(topk_ids + token * EXTENTS.K + k, given, EXTENTS)
    weights = tl.load(topk_weights + token * EXTENTS.K + k, mask=given & (weighted != 0), other=0)
    own_targets = load_experts(topk_ids + token * EXTENTS.K + target, (target < EXTENTS.K) & exists, EXTENTS)
    # The compiler leaves loads before a barrier of the block. So they are under way while choices are counted.
    block_barrier()
    send_choices(
        ctx, slot, topk_ids, own=own_targets, token=token, tokens=tokens, call=call, bases=bases, EXTENTS=EXTENTS
    )
    words = weights.to(tl.int32, bitcast=True)
    send_weights(ctx, slot, words, token=token, weighted=weighted, call=call, bases=bases, EXTENTS=EXTENTS)
    there = FORM.MOVES & exists
    blocks, factors = quantize_slice(
        x, token, there, blocks=blocks, factors=factors, element=element, FORM=FORM, EXTENTS=EXTENTS
    )
    if FORM.MOVES:
        send_slice(
            ctx,
            slot,
            own,
            token=token,
            blocks=blocks,
            factors=factors,
            bases=bases,
            element=element,
            FORM=FORM,
            EXTENTS=EXTENTS,
        )
    return blocks, factors


@triton.jit(do_not_specialize=["tokens", "weighted", "alignment"])
def dispatch(
    slot,
    x,
    scales,
    topk_ids,
    topk_weights,
    layout,
    num_tokens,
    statistics,
    tokens,
    weighted,
    alignment,
    FORM: tl.constexpr,
    PHASE: tl.constexpr,
    EXTENTS: tl.constexpr,
):
    """As `iris.experts.dispatch.dispatch`, but for ``slot`` and ``EXTENTS``: `LowLatencySlot` and `FewTokens`."""
    ctx = DeviceContext.initialize(slot.context, num_ranks=EXTENTS.W)
    bases = peers(ctx, EXTENTS.W)
    gdc_wait()
    tokens = tokens_of(tokens, num_tokens)
    program = tl.program_id(0)
    element: tl.constexpr = layout.rows.dtype.element_ty
    AT_ONCE: tl.constexpr = EXTENTS.PROGRAMS // EXTENTS.SPLIT
    first = program // EXTENTS.SPLIT
    # A program that has one token keeps its slice in registers.
    AT_END: tl.constexpr = (PHASE == WHOLE) & (EXTENTS.M <= AT_ONCE)
    call = tl.load(slot.calls + program) + 1
    if PHASE != RECEIVE:
        for token in range(first, EXTENTS.M, AT_ONCE):
            blocks, factors = begin_token(
                ctx,
                slot,
                x,
                scales=scales,
                topk_ids=topk_ids,
                topk_weights=topk_weights,
                token=token,
                tokens=tokens,
                weighted=weighted,
                call=call,
                bases=bases,
                element=element,
                FORM=FORM,
                EXTENTS=EXTENTS,
            )
            if AT_END:
                end_token(
                    ctx,
                    slot,
                    scales,
                    layout=layout,
                    statistics=statistics,
                    token=token,
                    weighted=weighted,
                    alignment=alignment,
                    call=call,
                    blocks=blocks,
                    factors=factors,
                    FORM=FORM,
                    EXTENTS=EXTENTS,
                )
    if (PHASE != SEND) & (not AT_END):
        for token in range(first, EXTENTS.M, AT_ONCE):
            there = FORM.MOVES & (token < tokens)
            blocks, factors = load_slice(x, scales, token, there=there, FORM=FORM, EXTENTS=EXTENTS)
            blocks, factors = quantize_slice(
                x, token, there, blocks=blocks, factors=factors, element=element, FORM=FORM, EXTENTS=EXTENTS
            )
            end_token(
                ctx,
                slot,
                scales,
                layout=layout,
                statistics=statistics,
                token=token,
                weighted=weighted,
                alignment=alignment,
                call=call,
                blocks=blocks,
                factors=factors,
                FORM=FORM,
                EXTENTS=EXTENTS,
            )
    if PHASE != SEND:
        if program == 0:
            tl.store(slot.tokens, tl.cast(tokens, tl.int32))
        store_after_sync(slot.calls + program, call)
