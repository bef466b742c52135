"""dispatch: each token's row goes once to every rank that has one of its experts, and there to the experts' rows.

A token keeps its number on the way: row t of rank s lies in row t of s's region at the receiver, whether or not the
rows before it came there. So a sender needs to ask nobody, and a receiver knows where each row is. What a receiver
cannot know is how many rows each expert gets from the tokens before. So ranks also send all choices and, of each
program's tokens, the number of rows by expert.

Over the link, in one step, from each rank to each other: the choices, 8 K bytes a token, and 4 LOCAL bytes a program
with tokens; a row of H elements for each token with an expert there, and its scale factors if it is of fp8. Locally
every row is read and written once more for each of its experts; own tokens' rows are read where they are.

There are two kinds of programs, P of each, so that the link and the memory are busy at once. Program p of each kind
serves the p-th share of a rank's tokens, in steps of `Extents.STEP` tokens. One that sends:

1. sends the choices of its rank's tokens, and their counts, to all ranks; then it adds 1 to ``routed`` of all;
2. step by step, sends the rows of its rank's tokens to the other ranks; then it raises ``sent`` of all.

It waits for nothing. Once in `calls_between_refreshes` calls it also raises flags that it may not have raised for long.
One that receives:

3. waits for ``routed`` of all programs of all ranks. Now it knows where its tokens' rows begin for each expert, and
   stores to ``places`` where each choice goes;
4. step by step, for each rank, waits for ``sent`` of program p there, and copies the rows to the places of their
   experts.

So there is no deadlock if all programs of a rank are resident: two of them share a multiprocessor
(`iris.experts.calls`). Those that send have the lower numbers, so that they begin first. The two kinds may also be two
launches, one after the other, with anything in between (``async_op=True``). Who writes which word, and why it may be
written again: `iris.experts.memory`.
"""

import triton
import triton.language as tl

from iris.experts.numbering import add_tallies, first_rows, load_words, number_choices, rows_of
from iris.experts.routing import (
    choices,
    chunk_of,
    load_choices,
    load_experts,
    number_of_program,
    owner_bits,
    signal_all,
    steps_of,
    tokens_of,
    tokens_of_step,
)
from iris.experts.rows import NOT, copy_rows, load_columns, send_rows
from iris.experts.statistics import begin_wait, count_rows, end_dispatch_wait
from iris.experts.token_rows import load_places
from iris.language.barrier import lanes
from iris.language.context import DeviceContext
from iris.language.dependent_launch import gdc_wait
from iris.language.fences import cta_sync
from iris.language.ordering import store_after_sync


@triton.jit
def send_choices(ctx, slot, topk_ids, topk_weights, tokens, weighted, EXTENTS: tl.constexpr):
    """Step 1: number this program's choices, send them and their counts to all ranks, and signal ``routed``."""
    EXPERTS: tl.constexpr = EXTENTS.EXPERTS
    CHOICES: tl.constexpr = EXTENTS.CHOICES
    rank, program = ctx.cur_rank, tl.program_id(0)
    first, last = chunk_of(tokens, program, EXTENTS)
    expert, pair = tl.arange(0, EXTENTS.EXPERTS), tl.arange(0, EXTENTS.COUNTED * EXTENTS.CHOICES)
    tally = tl.zeros((EXPERTS,), dtype=tl.int32)
    region = tl.cast(rank, tl.int64) * (EXTENTS.M * EXTENTS.K)
    for begin in range(first, last, EXTENTS.COUNTED):
        token, k = begin + pair // CHOICES, pair % CHOICES
        at, mask = token * EXTENTS.K + k, (token < last) & (k < EXTENTS.K)
        # Under way while choices are compared.
        weights = tl.load(topk_weights + at, mask=mask & (weighted != 0))
        word, tally = number_choices(load_experts(topk_ids + at, mask, EXTENTS), tally, EXTENTS)
        for distance in range(0, EXTENTS.W):
            peer = (rank + distance) % EXTENTS.W
            ctx.store(slot.choices + region + at, word, peer, mask=mask)
            if weighted:
                ctx.store(slot.weights + region + at, weights, peer, mask=mask)
    mine = slot.tallies + (rank * EXTENTS.PROGRAMS + program) * EXTENTS.LOCAL
    for distance in range(0, EXTENTS.W):
        peer = (rank + distance) % EXTENTS.W
        there = (expert // EXTENTS.LOCAL == peer) & (expert < EXTENTS.E) & (first < last)
        ctx.store(mine + expert - peer * EXTENTS.LOCAL, tally, peer, mask=there)
        if program == 0:
            ctx.store(slot.tokens + rank, tl.cast(tokens, tl.int32), peer)
    peers = lanes()
    ctx._signal_ranks(slot.routed + rank, 1 + 0 * peers, peers, here=peers < EXTENTS.W, op="add")


@triton.constexpr_function
def calls_between_refreshes(steps):
    """In which flags rise by 2^30 at most. It divides 2^32, so that it goes on where the numbers of calls wrap."""
    return (1 << 30) // triton.next_power_of_2(steps)


@triton.jit
def refresh(ctx, slot, call, EXTENTS: tl.constexpr):
    """Raise to this call what its waits have behind them: flags that other calls may not have raised.

    Without that, one that is 2^31 behind would be taken for one ahead (`iris.experts.memory`).
    """
    flag = ctx.cur_rank * EXTENTS.PROGRAMS + tl.program_id(0)
    signal_all(ctx, slot.sent + flag, call * EXTENTS.STEPS + EXTENTS.STEPS - 1)
    signal_all(ctx, slot.weighed + flag, call - 1)


@triton.jit
def send(
    ctx, slot, x, scales, topk_ids, topk_weights, tokens, weighted, call, FORM: tl.constexpr, EXTENTS: tl.constexpr
):
    """What a program that sends does: steps 1 and 2, and sometimes a `refresh`."""
    rank, program = ctx.cur_rank, tl.program_id(0)
    first, last = chunk_of(tokens, program, EXTENTS)
    token = first + tl.arange(0, EXTENTS.STEP)
    if FORM.MOVES:
        # Rows are under way while choices are numbered, and choices of two steps ahead while rows are sent.
        bits = owner_bits(load_choices(topk_ids, token, token < last, EXTENTS), EXTENTS)
        later = load_choices(topk_ids, token + EXTENTS.STEP, token + EXTENTS.STEP < last, EXTENTS)
        rows, column = x + tl.cast(token, tl.int64) * EXTENTS.H, tl.arange(0, EXTENTS.BLOCK)
        found = load_columns(rows, bits != 0, column, EXTENTS.H, other=0)
    send_choices(ctx, slot, topk_ids, topk_weights, tokens=tokens, weighted=weighted, EXTENTS=EXTENTS)
    if FORM.MOVES:
        for step in range(steps_of(first, last, EXTENTS.STEP)):
            next_token = token + EXTENTS.STEP
            next_bits = owner_bits(later, EXTENTS)
            later = load_choices(topk_ids, next_token + EXTENTS.STEP, next_token + EXTENTS.STEP < last, EXTENTS)
            found = send_rows(
                ctx,
                slot,
                x,
                scales=scales,
                found=found,
                token=token,
                bits=bits,
                next_token=next_token,
                next_bits=next_bits,
                FORM=FORM,
                EXTENTS=EXTENTS,
            )
            token, bits = next_token, next_bits
            # To this rank too: rows that are quantized go by way of its own region.
            signal_all(ctx, slot.sent + rank * EXTENTS.PROGRAMS + program, call * EXTENTS.STEPS + step + 1)
    REFRESHED: tl.constexpr = calls_between_refreshes(EXTENTS.STEPS)
    if call % REFRESHED == 0:
        refresh(ctx, slot, call, EXTENTS)


@triton.jit
def turn_of(turn, tokens, rank, program, SIZE: tl.constexpr, EXTENTS: tl.constexpr):
    """The source of a program's ``turn``, and its tokens [first, last). Turns go round the ranks, ``SIZE`` tokens each.

    ``tokens``: how many each rank has.
    """
    source = (rank + turn % EXTENTS.W) % EXTENTS.W
    first, last = tokens_of_step(tokens, source, turn // EXTENTS.W, program, SIZE=SIZE, EXTENTS=EXTENTS)
    return source, first, last


@triton.jit
def words_of_turn(slot, turn, tokens, rank, program, EXTENTS: tl.constexpr):
    """The choices of a turn's tokens, in the words that their rank has sent (`iris.experts.numbering`)."""
    source, first, last = turn_of(turn, tokens, rank, program, SIZE=EXTENTS.COUNTED, EXTENTS=EXTENTS)
    token = first + tl.arange(0, EXTENTS.COUNTED)
    return load_words(slot, tl.cast(source, tl.int64) * EXTENTS.M + token, token < last, EXTENTS)


@triton.jit
def place_choices(slot, layout, later, start, tokens, rank, program, turns, EXTENTS: tl.constexpr):
    """Store to ``places`` to which row each choice of a program's tokens goes.

    ``later``: `words_of_turn` of turn 0. ``start``: as `rows_of` takes it.
    """
    k = choices(EXTENTS)
    for turn in range(turns):
        word = later
        # Of the next turn, under way while these are placed.
        later = words_of_turn(slot, turn + 1, tokens=tokens, rank=rank, program=program, EXTENTS=EXTENTS)
        source, first, last = turn_of(turn, tokens, rank, program, SIZE=EXTENTS.COUNTED, EXTENTS=EXTENTS)
        token = first + tl.arange(0, EXTENTS.COUNTED)
        at = (tl.cast(source, tl.int64) * EXTENTS.M + token)[:, None] * EXTENTS.K + k[None, :]
        place = rows_of(word, start, source=source, rank=rank, EXTENTS=EXTENTS)
        tl.store(layout.places + at, place, mask=(token < last)[:, None] & (k < EXTENTS.K)[None, :])


@triton.jit
def receive(
    ctx, slot, x, scales, layout, statistics, program, call, alignment, FORM: tl.constexpr, EXTENTS: tl.constexpr
):
    """What a program that receives does: steps 3 and 4."""
    QUANTIZED: tl.constexpr = FORM.QUANTIZE != NOT
    STARTS: tl.constexpr = EXTENTS.RANKS * EXTENTS.LOCALS
    rank, peers = ctx.cur_rank, lanes()
    if statistics is not None:
        # One rank after the other, so that the time of each wait is that of one rank.
        for distance in range(EXTENTS.W):
            source = (rank + distance) % EXTENTS.W
            begun = begin_wait(statistics)
            ctx.wait(slot.routed + source, call * EXTENTS.PROGRAMS, cmp="reached")
            end_dispatch_wait(statistics, source, begun)
    else:
        ctx._wait_ranks(
            flag_ptrs=slot.routed + peers,
            wanted=call * EXTENTS.PROGRAMS + 0 * peers,
            here=peers < EXTENTS.W,
            first=0,
            num_ranks=EXTENTS.W,
        )
    ranks = tl.arange(0, EXTENTS.RANKS)
    tokens = tl.load(slot.tokens + ranks, mask=ranks < EXTENTS.W, other=0)
    most = tl.max(tokens, axis=0)
    # Programs before this one have tokens if it has; the first writes what there is of all.
    if (program < most) | (program == 0):
        # Under way while tallies are added up.
        later = words_of_turn(slot, 0, tokens=tokens, rank=rank, program=program, EXTENTS=EXTENTS)
        before, whole = add_tallies(slot, tokens, program, EXTENTS)
        total = tl.sum(whole, axis=0)
        begin, end = first_rows(total, alignment, EXTENTS)
        start = tl.reshape(begin[None, :] + tl.cumsum(whole, axis=0) - whole + before, (STARTS,))
        first, last = chunk_of(most, program, EXTENTS)
        turns = steps_of(first, last, EXTENTS.COUNTED) * EXTENTS.W
        place_choices(
            slot, layout, later, start, tokens=tokens, rank=rank, program=program, turns=turns, EXTENTS=EXTENTS
        )
        if FORM.MOVES:
            # Places that other threads have stored are read next.
            cta_sync()
            for turn in range(steps_of(first, last, EXTENTS.STEP) * EXTENTS.W):
                source, begin_of, end_of = turn_of(turn, tokens, rank, program, SIZE=EXTENTS.STEP, EXTENTS=EXTENTS)
                if begin_of < end_of:
                    token = begin_of + tl.arange(0, EXTENTS.STEP)
                    there = tl.cast(source, tl.int64) * EXTENTS.M + token
                    rows = load_places(layout.places, there, token < end_of, EXTENTS)
                    # Own rows are read where they are, unless they were quantized.
                    if (source != rank) | QUANTIZED:
                        flag = slot.sent + source * EXTENTS.PROGRAMS + program
                        begun = begin_wait(statistics)
                        ctx.wait(flag, call * EXTENTS.STEPS + turn // EXTENTS.W + 1, cmp="reached")
                        end_dispatch_wait(statistics, source, begun)
                    copy_rows(
                        slot,
                        x,
                        scales,
                        layout,
                        token=token,
                        source=source,
                        rank=rank,
                        rows=rows,
                        FORM=FORM,
                        EXTENTS=EXTENTS,
                    )
        if program == 0:
            expert = tl.arange(0, EXTENTS.LOCALS)
            tl.store(layout.counts + expert, total, mask=expert < EXTENTS.LOCAL)
            tl.store(layout.offsets + expert, begin, mask=expert < EXTENTS.LOCAL)
            tl.store(layout.offsets + EXTENTS.LOCAL, tl.max(end, axis=0))
            count_rows(statistics, expert, total, expert < EXTENTS.LOCAL)


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
    """``x``: ``[tokens, H]``. ``topk_ids``: int32 or int64 ``[tokens, K]``, -1 for none.

    ``topk_weights``: float32, likewise, sent if ``weighted``. ``slot``, ``layout``: `Slot` and `Layout`. ``scales``:
    `Scales`, or None. ``num_tokens``: int32 ``[1]``, how many of the tokens are dispatched, or None for all.
    ``statistics``: `Statistics`, or None. ``alignment``: of an expert's first row in the compact layout, 0 for the
    expanded one. ``FORM`` and ``EXTENTS``: `Form` and `Extents`. ``PHASE``: `WHOLE`, with 2 P programs, or a half,
    with P.
    """
    ctx = DeviceContext.initialize(slot.context, num_ranks=EXTENTS.W)
    gdc_wait()
    tokens = tokens_of(tokens, num_tokens)
    program = number_of_program(PHASE, EXTENTS)
    call = tl.load(slot.calls + program) + 1
    if program < EXTENTS.PROGRAMS:
        send(
            ctx,
            slot,
            x,
            scales=scales,
            topk_ids=topk_ids,
            topk_weights=topk_weights,
            tokens=tokens,
            weighted=weighted,
            call=call,
            FORM=FORM,
            EXTENTS=EXTENTS,
        )
    else:
        receive(
            ctx,
            slot,
            x,
            scales=scales,
            layout=layout,
            statistics=statistics,
            program=program - EXTENTS.PROGRAMS,
            call=call,
            alignment=alignment,
            FORM=FORM,
            EXTENTS=EXTENTS,
        )
    store_after_sync(slot.calls + program, call)
