"""combine: what the experts have made of a token's rows is added up, on their ranks first, then on the token's own.

Over the link, in one step: from each rank of a token's experts one row of H elements, the sum of what these have made
of it, rounded to the rows' type. Where the weights are given here and not with the dispatch, they go to the experts'
ranks first, 4 K bytes a token, in a step of their own: that is less than a row for each choice.

Program p serves the p-th share of every rank's tokens, as in dispatch:

1. It sends its own tokens' weights, if they are given, to all other ranks; then it sets ``weighed`` there.
2. For each other rank it waits for ``weighed`` of program p, if weights are given, adds up the rows of each token of
   that share in float32, in the order of its choices, and stores the sum to ``partials`` of the token's rank. Then it
   sets ``returned`` of all other ranks.
3. It waits for ``returned`` of program p of all of them, and adds up the sums of each own token in float32, in the
   order of ranks. The sum of this rank's own experts is not rounded before.

Every rank sets ``returned`` at every other in each call, also where no token went: it says besides that what came
with this dispatch has been read, so that the next one in this slot may write. More: `iris.experts.memory`.
"""

import triton
import triton.language as tl

from iris.experts.dispatch import PAIRS
from iris.experts.routing import (
    any_is,
    choices,
    chunk_of,
    load_choices,
    owners,
    signal_others,
    wait_others,
)
from iris.language.barrier import lanes
from iris.language.context import DeviceContext
from iris.language.dependent_launch import gdc_wait

# Whether rows are multiplied: not at all, by weights that came with the dispatch, or by such as are given now.
UNWEIGHTED, DISPATCHED, GIVEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def send_weights(ctx, slot, topk_weights, call, EXTENTS: tl.constexpr):
    """Step 1; this rank's own go to its own memory."""
    rank, program = ctx.cur_rank, tl.program_id(0)
    first, last = chunk_of(tl.load(slot.tokens + rank), program)
    region = tl.cast(rank, tl.int64) * (EXTENTS.M * EXTENTS.K)
    for begin in range(first * EXTENTS.K, last * EXTENTS.K, PAIRS):
        pair = begin + tl.arange(0, PAIRS)
        mask = pair < last * EXTENTS.K
        weights = tl.load(topk_weights + pair, mask=mask)
        for distance in range(0, EXTENTS.W):
            ctx.store(slot.weights + region + pair, weights, (rank + distance) % EXTENTS.W, mask=mask)
    signal_others(ctx, slot.weighed + rank * tl.num_programs(0) + program, call)


@triton.jit
def add_up(slot, y, places, token, column, inside, WEIGHTS: tl.constexpr, EXTENTS: tl.constexpr):
    """The sum of a token's rows on this rank, float32, in the order of its choices. ``token``: of all ranks'."""
    BLOCK: tl.constexpr = EXTENTS.BLOCK
    K: tl.constexpr = EXTENTS.K
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for choice in tl.static_range(K):
        at = tl.cast(token, tl.int64) * EXTENTS.K + choice
        place = tl.load(places + at)
        here = place >= 0
        row = tl.load(y + tl.cast(place, tl.int64) * EXTENTS.H + column, mask=inside & here, other=0).to(tl.float32)
        if WEIGHTS != UNWEIGHTED:
            row *= tl.load(slot.weights + at, mask=here, other=0)
        total += row
    return total


@triton.jit
def send_sums(ctx, slot, y, places, source, WEIGHTS: tl.constexpr, EXTENTS: tl.constexpr):
    """Step 2, for the tokens of rank ``source``."""
    first, last = chunk_of(tl.load(slot.tokens + source), tl.program_id(0))
    k, column = choices(EXTENTS), tl.arange(0, EXTENTS.BLOCK)
    for token in range(first, last):
        there = tl.cast(source, tl.int64) * EXTENTS.M + token
        place = tl.load(places + there * EXTENTS.K + k, mask=k < EXTENTS.K, other=-1)
        if tl.max(place, axis=0) >= 0:
            target = (tl.cast(ctx.cur_rank, tl.int64) * EXTENTS.M + token) * EXTENTS.H
            for begin in range(0, EXTENTS.H, EXTENTS.BLOCK):
                columns = begin + column
                inside = columns < EXTENTS.H
                total = add_up(
                    slot,
                    y,
                    places,
                    there,
                    column=columns,
                    inside=inside,
                    WEIGHTS=WEIGHTS,
                    EXTENTS=EXTENTS,
                )
                rounded = total.to(slot.partials.dtype.element_ty)
                ctx.store(slot.partials + target + columns, rounded, source, mask=inside)


@triton.jit
def receive_sums(ctx, slot, y, places, out, WEIGHTS: tl.constexpr, EXTENTS: tl.constexpr):
    """Step 3."""
    BLOCK: tl.constexpr = EXTENTS.BLOCK
    rank = ctx.cur_rank
    first, last = chunk_of(tl.load(slot.tokens + rank), tl.program_id(0))
    column = tl.arange(0, EXTENTS.BLOCK)
    for token in range(first, last):
        own = tl.cast(rank, tl.int64) * EXTENTS.M + token
        owner = owners(load_choices(slot.ids, own, EXTENTS), EXTENTS)
        for begin in range(0, EXTENTS.H, EXTENTS.BLOCK):
            columns = begin + column
            inside = columns < EXTENTS.H
            total = tl.zeros((BLOCK,), dtype=tl.float32)
            for expert_rank in range(EXTENTS.W):
                if any_is(owner, expert_rank):
                    if expert_rank == rank:
                        total += add_up(
                            slot,
                            y,
                            places,
                            own,
                            column=columns,
                            inside=inside,
                            WEIGHTS=WEIGHTS,
                            EXTENTS=EXTENTS,
                        )
                    else:
                        source = (tl.cast(expert_rank, tl.int64) * EXTENTS.M + token) * EXTENTS.H
                        total += tl.load(slot.partials + source + columns, mask=inside, other=0).to(tl.float32)
            at = tl.cast(token, tl.int64) * EXTENTS.H + columns
            tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def combine(slot, y, topk_weights, places, out, WEIGHTS: tl.constexpr, EXTENTS: tl.constexpr):
    """``y``: the rows that the experts have made, in the layout of the dispatch. ``out``: ``[tokens, H]``.

    ``topk_weights``: float32 ``[tokens, K]``, where ``WEIGHTS`` is `GIVEN`. ``places``: of the dispatch's `Layout`.
    """
    ctx = DeviceContext.initialize(slot.context, num_ranks=EXTENTS.W)
    gdc_wait()
    rank, program, programs = ctx.cur_rank, tl.program_id(0), tl.num_programs(0)
    # The number of the dispatch, which is over.
    call = tl.load(slot.calls + program)
    if WEIGHTS == GIVEN:
        send_weights(ctx, slot, topk_weights, call, EXTENTS=EXTENTS)
    for distance in range(1, EXTENTS.W):
        source = (rank + distance) % EXTENTS.W
        if WEIGHTS == GIVEN:
            ctx.wait(slot.weighed + source * programs + program, call, cmp="reached")
        send_sums(ctx, slot, y, places, source=source, WEIGHTS=WEIGHTS, EXTENTS=EXTENTS)
    signal_others(ctx, slot.returned + rank * programs + program, call)
    wait_others(ctx, slot.returned + lanes() * programs + program, call)
    receive_sums(ctx, slot, y, places, out=out, WEIGHTS=WEIGHTS, EXTENTS=EXTENTS)
