"""combine: what the experts have made of a token's rows is added up, on their ranks first, then on the token's own.

Over the link, in one step: from each rank of a token's experts one row of H elements, the sum of what these have made
of it, rounded to the rows' type. Where the weights are given here and not with the dispatch, they go to the experts'
ranks first, 4 K bytes a token, in a step of their own: that is less than a row for each choice.

There are two kinds of programs, P of each, so that this rank reads its memory while the link carries what it has sent.
Program p of each kind serves the p-th share of a rank's tokens, in the steps of dispatch. One that sends:

1. sends its rank's tokens' weights, if they are given, to all ranks; then it sets ``weighed`` there;
2. waits for ``weighed`` of program p of all others, if weights are given;
3. step by step, adds up the rows of each token of each other rank in float32, in the order of its choices, stores the
   sums to ``partials`` of the token's rank, and raises ``returned`` there.

One that receives:

4. step by step, adds up the rows of its first own token, waits for ``returned`` of program p of all others, and adds
   up the sums of each own token in float32, in the order of ranks. The sum of this rank's own experts, which it makes
   itself, is not rounded before. Then it adds what the caller gives besides, its bias, and rounds.

Every rank raises ``returned`` at every other in each call, to its last value, also where no token went: it says besides
that what came with this dispatch has been read, so that the next one in this slot may write. More:
`iris.experts.memory`.
"""

import triton
import triton.language as tl

from iris.experts.numbering import load_sent_choices
from iris.experts.routing import (
    chunk_of,
    has_bit,
    number_of_program,
    owner_bits,
    signal_all,
    signal_others,
    steps_of,
    tokens_of_step,
    wait_others,
)
from iris.experts.statistics import begin_wait, end_combine_wait
from iris.experts.token_rows import GIVEN, add_up, added_columns, first_pieces, number_of, places_of
from iris.language.barrier import LANES, lanes
from iris.language.context import DeviceContext
from iris.language.dependent_launch import gdc_wait

# Weights that a program copies at a time.
PAIRS = tl.constexpr(256)


@triton.jit
def send_weights(ctx, slot, topk_weights, call, EXTENTS: tl.constexpr):
    """Steps 1 and 2; this rank's own go to its own memory."""
    rank, program = ctx.cur_rank, tl.program_id(0)
    first, last = chunk_of(tl.load(slot.tokens + rank), program, EXTENTS)
    region = tl.cast(rank, tl.int64) * (EXTENTS.M * EXTENTS.K)
    for begin in range(first * EXTENTS.K, last * EXTENTS.K, PAIRS):
        pair = begin + tl.arange(0, PAIRS)
        mask = pair < last * EXTENTS.K
        weights = tl.load(topk_weights + pair, mask=mask)
        for distance in range(0, EXTENTS.W):
            ctx.store(slot.weights + region + pair, weights, (rank + distance) % EXTENTS.W, mask=mask)
    signal_all(ctx, slot.weighed + rank * EXTENTS.PROGRAMS + program, call)
    wait_others(ctx, slot.weighed + lanes() * EXTENTS.PROGRAMS + program, call)


@triton.jit
def load_bias(bias, at, mask):
    """A tuple of what there is to be added, in this order."""
    found = ()
    if bias.first is not None:
        found += (tl.load(bias.first + at, mask=mask, other=0),)
    if bias.second is not None:
        found += (tl.load(bias.second + at, mask=mask, other=0),)
    return found


@triton.jit
def add_bias(total, found):
    for each in tl.static_range(len(found)):
        total += found[each].to(tl.float32)
    return total


@triton.jit
def load_sums(slot, bits, rank, token, columns, first, PEERS: tl.constexpr, EXTENTS: tl.constexpr):
    """Columns of what other ranks have made of an own token: of so many, from the ``first`` other one on.

    ``bits``: of the ranks that have experts of it.
    """
    sums = ()
    for each in tl.static_range(PEERS):
        peer = first + each + (first + each >= rank).to(tl.int32)
        at = (tl.cast(peer, tl.int64) * EXTENTS.M + token) * EXTENTS.H + columns
        # Ranks that there are not have no bit.
        sent = has_bit(bits, peer)
        if EXTENTS.W + 2 * PEERS > LANES:
            # Nor has the word one for them. PTX would find its sign there (PTX ISA, "shr"), and AMD its lowest bits.
            sent = has_bit(bits, tl.minimum(peer, EXTENTS.W - 1)) & (peer < EXTENTS.W)
        sums += (tl.load(slot.partials + at, mask=sent & (columns < EXTENTS.H), other=0),)
    return sums


@triton.jit
def turn_of(turn, tokens, rank, program, EXTENTS: tl.constexpr):
    """The source, and the tokens [first, last) of it, of a sender's ``turn``: each step has one of each other rank.

    ``tokens``: of each rank.
    """
    source = (rank + 1 + turn % (EXTENTS.W - 1)) % EXTENTS.W
    first, last = tokens_of_step(tokens, source, turn // (EXTENTS.W - 1), program, SIZE=EXTENTS.SUMS, EXTENTS=EXTENTS)
    return source, first, last


@triton.jit
def send_sums(ctx, slot, y, places, call, WEIGHTS: tl.constexpr, EXTENTS: tl.constexpr):
    """Step 3."""
    ADDED: tl.constexpr = added_columns(EXTENTS)
    rank, program = ctx.cur_rank, tl.program_id(0)
    ranks = tl.arange(0, EXTENTS.RANKS)
    tokens = tl.load(slot.tokens + ranks, mask=ranks < EXTENTS.W, other=0)
    first, last = chunk_of(tl.max(tl.where(ranks == rank, 0, tokens), axis=0), program, EXTENTS)
    steps = tl.maximum(steps_of(first, last, EXTENTS.SUMS), 1)
    next_source, next_first, next_last = turn_of(0, tokens, rank, program, EXTENTS=EXTENTS)
    chosen = places_of(
        slot,
        places,
        tl.cast(next_source, tl.int64) * EXTENTS.M + next_first,
        next_first < next_last,
        WEIGHTS=WEIGHTS,
        EXTENTS=EXTENTS,
    )
    under_way = first_pieces(y, chosen, EXTENTS.AHEAD, EXTENTS)
    for turn in range(steps * (EXTENTS.W - 1)):
        source, first, last = next_source, next_first, next_last
        next_source, next_first, next_last = turn_of(turn + 1, tokens, rank, program, EXTENTS=EXTENTS)
        # A turn without tokens has one that is not there, so that the next turn's are under way after it.
        for token in range(first, tl.maximum(last, first + 1)):
            more = token + 1 < last
            next_token = tl.where(more, token + 1, next_first)
            next_chosen = places_of(
                slot,
                places,
                tl.cast(tl.where(more, source, next_source), tl.int64) * EXTENTS.M + next_token,
                more | (next_first < next_last),
                WEIGHTS=WEIGHTS,
                EXTENTS=EXTENTS,
            )
            here = number_of(chosen[0], EXTENTS.K) > 0
            target = slot.partials + (tl.cast(rank, tl.int64) * EXTENTS.M + token) * EXTENTS.H
            for start in range(0, EXTENTS.H, ADDED):
                columns = start + tl.arange(0, ADDED)
                total, under_way = add_up(
                    y, under_way, chosen, next_chosen, start=start, WEIGHTS=WEIGHTS, EXTENTS=EXTENTS
                )
                mask = here & (columns < EXTENTS.H)
                ctx.store(target + columns, total.to(slot.partials.dtype.element_ty), source, mask=mask)
            chosen = next_chosen
        if turn % (EXTENTS.W - 1) == EXTENTS.W - 2:
            step = turn // (EXTENTS.W - 1)
            reached = tl.where(step == steps - 1, EXTENTS.STEPS - 1, step + 1)
            signal_others(ctx, slot.returned + rank * EXTENTS.PROGRAMS + program, call * EXTENTS.STEPS + reached)


@triton.jit
def send(ctx, slot, y, topk_weights, places, call, WEIGHTS: tl.constexpr, EXTENTS: tl.constexpr):
    """Steps 1 to 3."""
    if WEIGHTS == GIVEN:
        send_weights(ctx, slot, topk_weights, call, EXTENTS=EXTENTS)
    if EXTENTS.W > 1:
        send_sums(ctx, slot, y, places, call=call, WEIGHTS=WEIGHTS, EXTENTS=EXTENTS)


@triton.jit
def wait_for_sums(ctx, slot, flags, program, value, statistics, EXTENTS: tl.constexpr):
    """Until program ``program`` of all others has raised ``returned`` to this value. ``flags``: where these are."""
    if statistics is not None:
        # One rank after the other, so that the time of each wait is that of one rank.
        for distance in range(1, EXTENTS.W):
            source = (ctx.cur_rank + distance) % EXTENTS.W
            begun = begin_wait(statistics)
            ctx.wait(slot.returned + source * EXTENTS.PROGRAMS + program, value, cmp="reached")
            end_combine_wait(statistics, source, begun)
    else:
        wait_others(ctx, flags, value)


@triton.jit
def receive(ctx, slot, y, places, out, bias, statistics, program, call, WEIGHTS: tl.constexpr, EXTENTS: tl.constexpr):
    """Step 4."""
    ADDED: tl.constexpr = added_columns(EXTENTS)
    SUMS: tl.constexpr = EXTENTS.SUMS
    # The sums of so many ranks are under way together.
    PEERS: tl.constexpr = max(1, min(EXTENTS.W - 1, 2))
    # Of more ranks a token has few rows here, and a thread no registers for these beside the sums.
    AHEAD: tl.constexpr = EXTENTS.AHEAD if EXTENTS.W <= 3 else 1
    rank, region = ctx.cur_rank, tl.cast(ctx.cur_rank, tl.int64) * EXTENTS.M
    if WEIGHTS == GIVEN:
        # Own ones are stored by the program that sends them.
        ctx.wait(slot.weighed + rank * EXTENTS.PROGRAMS + program, call, cmp="reached")
    flags = slot.returned + lanes() * EXTENTS.PROGRAMS + program
    first, last = chunk_of(tl.load(slot.tokens + rank), program, EXTENTS)
    chosen = places_of(slot, places, region + first, first < last, WEIGHTS=WEIGHTS, EXTENTS=EXTENTS)
    under_way = first_pieces(y, chosen, AHEAD, EXTENTS)
    for token in range(first, last):
        next_chosen = places_of(slot, places, region + token + 1, token + 1 < last, WEIGHTS=WEIGHTS, EXTENTS=EXTENTS)
        sent = load_sent_choices(slot, region + token + tl.arange(0, 1), tl.full((1,), 1, tl.int1), EXTENTS)
        bits = tl.max(owner_bits(sent, EXTENTS), axis=0)
        for start in range(0, EXTENTS.H, ADDED):
            columns = start + tl.arange(0, ADDED)
            inside = columns < EXTENTS.H
            at = tl.cast(token, tl.int64) * EXTENTS.H + columns
            to_add = load_bias(bias, at, inside)
            own_sum, under_way = add_up(
                y, under_way, chosen, next_chosen, start=start, WEIGHTS=WEIGHTS, EXTENTS=EXTENTS
            )
            # After own rows, which wait for nobody.
            if ((token - first) % SUMS == 0) & (start == 0):
                value = call * EXTENTS.STEPS + (token - first) // SUMS + 1
                wait_for_sums(ctx, slot, flags, program=program, value=value, statistics=statistics, EXTENTS=EXTENTS)
            sums = load_sums(slot, bits, rank, token, columns=columns, first=0, PEERS=PEERS, EXTENTS=EXTENTS)
            total = tl.zeros_like(own_sum)
            for group in range(0, EXTENTS.W - 1, PEERS):
                for each in tl.static_range(PEERS):
                    # Own ones between those of the ranks before and after this one.
                    other = group + each
                    total += tl.where((other == rank) & (other < EXTENTS.W - 1), own_sum, 0)
                    total += sums[each].to(tl.float32)
                sums = load_sums(
                    slot, bits, rank, token, columns=columns, first=group + PEERS, PEERS=PEERS, EXTENTS=EXTENTS
                )
            total += tl.where(rank == EXTENTS.W - 1, own_sum, 0)
            total = add_bias(total, to_add)
            tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)
        chosen = next_chosen
    last_value = call * EXTENTS.STEPS + EXTENTS.STEPS - 1
    wait_for_sums(ctx, slot, flags, program=program, value=last_value, statistics=statistics, EXTENTS=EXTENTS)


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
    """``y``: the rows that the experts have made, in the layout of the dispatch. ``out``: ``[tokens, H]``.

    ``topk_weights``: float32 ``[tokens, K]``, where ``WEIGHTS`` is `GIVEN`. ``places``: of the dispatch's `Layout`.
    ``bias``: `Bias`. It may be ``out``: each element is read before it is written. ``statistics``: `Statistics`, or
    None. ``PHASE``: `WHOLE`, with 2 P programs, or a half, with P.
    """
    ctx = DeviceContext.initialize(slot.context, num_ranks=EXTENTS.W)
    gdc_wait()
    program = number_of_program(PHASE, EXTENTS)
    # The number of the dispatch, which is over.
    call = tl.load(slot.calls + program)
    if program < EXTENTS.PROGRAMS:
        send(ctx, slot, y, topk_weights, places=places, call=call, WEIGHTS=WEIGHTS, EXTENTS=EXTENTS)
    else:
        receive(
            ctx,
            slot,
            y,
            places,
            out=out,
            bias=bias,
            statistics=statistics,
            program=program - EXTENTS.PROGRAMS,
            call=call,
            WEIGHTS=WEIGHTS,
            EXTENTS=EXTENTS,
        )
