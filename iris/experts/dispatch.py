"""dispatch: each token's row to the ranks of its experts, once a rank, and there to the rows of the experts.

A token keeps its number on the way: row t of rank s lies in row t of s's region at the receiver, whether or not the
rows before it came there. So a sender needs to ask nobody, and a receiver knows where each row is. What a receiver
cannot know is how many rows each expert gets from the tokens before. So ranks also send all choices and, of each
program's tokens, the number of rows by expert.

Over the link, in one step, from each rank to each other: the choices, 8 K bytes a token, and 4 LOCAL bytes a program
with tokens; a row of H elements for each token with an expert there, and its factors if it is of fp8. Locally every row
is read and written once more for each of its experts; own tokens' rows are read where they are.

Program p serves the p-th share of every rank's tokens:

1. It sends the choices of its own tokens, and their counts, to all ranks; then it adds 1 to ``routed`` of all.
2. It sends its own tokens' rows to the other ranks; then it sets ``sent`` there.
3. It waits for ``routed`` of all programs of all ranks. Now it knows where its tokens' rows begin for each expert.
4. Rank by rank, it waits for ``sent`` of program p and copies the rows of that share to the places of their experts.

Nothing is waited for in the first two steps, so these are over on every rank whose programs are resident; there are
fewer of these than multiprocessors. Who writes which word, and why it may be written again: `iris.experts.memory`.
"""

import triton
import triton.language as tl

from iris.experts.routing import chunk_of, load_choices, load_experts
from iris.experts.rows import copy_rows, send_rows
from iris.language.barrier import lanes
from iris.language.context import DeviceContext
from iris.language.dependent_launch import gdc_wait
from iris.language.ordering import store_after_sync

# Choices that a program copies at a time.
PAIRS = tl.constexpr(256)


@triton.jit
def send_choices(ctx, slot, topk_ids, topk_weights, tokens, weighted, EXTENTS: tl.constexpr):
    """Step 1."""
    EXPERTS: tl.constexpr = EXTENTS.EXPERTS
    rank, program = ctx.cur_rank, tl.program_id(0)
    first, last = chunk_of(tokens, program)
    expert = tl.arange(0, EXTENTS.EXPERTS)
    tally = tl.zeros((EXPERTS,), dtype=tl.int32)
    for token in range(first, last):
        chosen = load_choices(topk_ids, token, EXTENTS)
        # A row for each expert of a token, also of one that it has chosen twice.
        tally += tl.max((chosen[:, None] == expert[None, :]).to(tl.int32), axis=0)
    mine = slot.tallies + (rank * tl.num_programs(0) + program) * EXTENTS.LOCAL
    region = tl.cast(rank, tl.int64) * (EXTENTS.M * EXTENTS.K)
    for distance in range(0, EXTENTS.W):
        peer = (rank + distance) % EXTENTS.W
        there = (expert // EXTENTS.LOCAL == peer) & (expert < EXTENTS.E) & (first < last)
        ctx.store(mine + expert - peer * EXTENTS.LOCAL, tally, peer, mask=there)
        for begin in range(first * EXTENTS.K, last * EXTENTS.K, PAIRS):
            pair = begin + tl.arange(0, PAIRS)
            mask = pair < last * EXTENTS.K
            chosen = load_experts(topk_ids + pair, mask, EXTENTS)
            ctx.store(slot.ids + region + pair, chosen, peer, mask=mask)
            if weighted:
                weights = tl.load(topk_weights + pair, mask=mask)
                ctx.store(slot.weights + region + pair, weights, peer, mask=mask)
        if program == 0:
            ctx.store(slot.tokens + rank, tl.cast(tokens, tl.int32), peer)
    peers = lanes()
    ctx._signal_ranks(slot.routed + rank, 1 + 0 * peers, peers, here=peers < EXTENTS.W, op="add")


@triton.jit
def add_tallies(slot, source, until, EXTENTS: tl.constexpr):
    """Rows from rank ``source`` to each local expert: of the tokens of programs before ``until``, and of all."""
    LOCALS: tl.constexpr = EXTENTS.LOCALS
    TALLIES: tl.constexpr = EXTENTS.TALLIES
    expert = tl.arange(0, LOCALS)
    before = tl.zeros((LOCALS,), dtype=tl.int32)
    whole = tl.zeros((LOCALS,), dtype=tl.int32)
    # Programs without tokens have sent none.
    senders = tl.minimum(tl.load(slot.tokens + source), tl.num_programs(0))
    for begin in range(0, senders, TALLIES):
        program = begin + tl.arange(0, TALLIES)
        at = (source * tl.num_programs(0) + program) * EXTENTS.LOCAL
        mask = (program < senders)[:, None] & (expert < EXTENTS.LOCAL)[None, :]
        tally = tl.load(slot.tallies + at[:, None] + expert[None, :], mask=mask, other=0)
        before += tl.sum(tl.where(program[:, None] < until, tally, 0), axis=0)
        whole += tl.sum(tally, axis=0)
    return before, whole


@triton.jit
def first_rows(slot, alignment, EXTENTS: tl.constexpr):
    """Where the rows of each local expert begin, and end with what is left free behind them.

    ``alignment`` 0: each expert has room for all that may come. Else this depends on how many come.
    """
    LOCALS: tl.constexpr = EXTENTS.LOCALS
    rows = tl.zeros((LOCALS,), dtype=tl.int32) + EXTENTS.W * EXTENTS.M
    if alignment > 0:
        total = tl.zeros((LOCALS,), dtype=tl.int32)
        for source in range(EXTENTS.W):
            _, whole = add_tallies(slot, source, 0, EXTENTS)
            total += whole
        rows = (total + alignment - 1) // alignment * alignment
    rows = tl.where(tl.arange(0, LOCALS) < EXTENTS.LOCAL, rows, 0)
    end = tl.cumsum(rows, axis=0)
    return end - rows, end


@triton.jit
def place_rows(ctx, slot, x, scales, layout, call, alignment, FORM: tl.constexpr, EXTENTS: tl.constexpr):
    """Steps 3 and 4."""
    rank, program, programs = ctx.cur_rank, tl.program_id(0), tl.num_programs(0)
    peers = lanes()
    ctx._wait_ranks(
        flag_ptrs=slot.routed + peers,
        wanted=call * programs + 0 * peers,
        here=peers < EXTENTS.W,
        first=0,
        num_ranks=EXTENTS.W,
    )
    # Programs before this one have tokens if it has; the first writes what there is of all.
    most = tl.max(tl.load(slot.tokens + peers, mask=peers < EXTENTS.W, other=0), axis=0)
    if (program < most) | (program == 0):
        begin, end = first_rows(slot, alignment, EXTENTS)
        start = begin
        for source in range(EXTENTS.W):
            before, whole = add_tallies(slot, source, program, EXTENTS)
            if source != rank:
                ctx.wait(slot.sent + source * programs + program, call, cmp="reached")
            copy_rows(
                slot,
                x,
                scales,
                layout,
                source=source,
                rank=rank,
                start=start + before,
                FORM=FORM,
                EXTENTS=EXTENTS,
            )
            start += whole
        if program == 0:
            expert = tl.arange(0, EXTENTS.LOCALS)
            tl.store(layout.counts + expert, start - begin, mask=expert < EXTENTS.LOCAL)
            tl.store(layout.offsets + expert, begin, mask=expert < EXTENTS.LOCAL)
            tl.store(layout.offsets + EXTENTS.LOCAL, tl.max(end, axis=0))


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
    """``x``: ``[tokens, H]``. ``topk_ids``: int32 or int64 ``[tokens, K]``, -1 for none.

    ``topk_weights``: float32, likewise, sent if ``weighted``. ``slot``, ``layout``: `Slot` and `Layout`. ``scales``:
    `Scales`, or None. ``alignment``: of an expert's first row in the compact layout, 0 for the expanded one. ``FORM``
    and ``EXTENTS``: `Form` and `Extents`.
    """
    ctx = DeviceContext.initialize(slot.context, num_ranks=EXTENTS.W)
    gdc_wait()
    program = tl.program_id(0)
    call = tl.load(slot.calls + program) + 1
    send_choices(ctx, slot, topk_ids, topk_weights, tokens=tokens, weighted=weighted, EXTENTS=EXTENTS)
    send_rows(ctx, slot, x, scales, topk_ids=topk_ids, tokens=tokens, call=call, FORM=FORM, EXTENTS=EXTENTS)
    place_rows(ctx, slot, x, scales, layout=layout, call=call, alignment=alignment, FORM=FORM, EXTENTS=EXTENTS)
    store_after_sync(slot.calls + program, call)
