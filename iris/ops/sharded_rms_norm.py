"""out = RMSNorm(sum of all ranks' input + residual), where each rank keeps the rows of the residual that it owns.

Two steps, W - 1 messages a rank in each. Of a row, which lies in the same place with every owner:

1. Each rank pushes its part of every other rank's row to that row's owner.
2. The owner waits for the parts of its own row, adds them up in the order of ranks, and its residual; it normalises the
   row, and pushes the result to all others, as the dtype of ``out``. With it goes the row's factor, if each has one.
3. Each rank waits for the other owners' results, and stores them.

Over the link go (W - 1) / W times the bytes of the input, and as much of ``out``, which is half of that for fp8.
`two_shot_rms_norm` of `iris.ops.all_reduce_rms_norm` sends sums, which are as wide as the input, and each rank reads
and writes all of the residual.

Slots and epochs are as in `iris.ccl.one_shot`, with a piece of a row for a block: parts in one array, which is
``[slots, pieces of rows, W sources, PART]``, and results in another, ``[..., W - 1, PART]``, by the distance to the
owner. Why no rank writes to a place that is not cleared, in its call e, to slot e % 3:

* *A part, to an owner.* In its call e - 1 the writer has received a result of the same row's place from this owner, who
  sent it in call e - 1, a kernel that ran after its call e - 2 had ended. In that it cleared slot (e - 3) % 3 = e % 3.
* *A result, from an owner.* It has received the reader's part of call e, which the reader sent after its call e - 1 had
  ended, and so e - 2, in which it cleared the slot.

A factor travels as an LL message (`iris.language.ll`) with the number of the epoch as its flag. An owner overwrites it
in its next call, after the reader's part of that call, which the reader sent after it had read the word. All calls
with these rows write it, so what is there before has another number. Each row has epochs of its own, and a call that
has no such row leaves them as they are. So calls of any number of rows may follow each other in the same memory.

How programs share a row, and what is rounded: as in `iris.ops.all_reduce_rms_norm`. NaNs do not keep their bits.
"""

import triton
import triton.language as tl

from iris.ccl.lamport_channel import SLOTS
from iris.ccl.one_shot import peers, push, recv_and_reduce, region
from iris.language.address import translate
from iris.language.cluster import enter, open_meeting
from iris.language.context import DeviceContext
from iris.language.dependent_launch import gdc_launch_dependents, gdc_wait
from iris.language.lamport import decode, elements_per_word, encode, lamport_clear, lamport_recv
from iris.language.ll import ll_recv, ll_send
from iris.language.ordering import store_after_sync
from iris.language.pairs import widen
from iris.ops.rms_norm import keep_residual, load_or_zero, normalise, over_the_row

# Rows that a program sends before it waits for the first of them.
AHEAD = tl.constexpr(1)


@triton.jit
def send_factor(ctx, factors, factor, stamp, leads, bases, W: tl.constexpr, LANES: tl.constexpr):
    """The ``factor`` of the own row to all other ranks. ``factors``: int64 ``[W]`` of that row's place."""
    k = tl.arange(0, LANES)
    word = tl.cast(factor, tl.int32, bitcast=True) + 0 * k
    for distance in tl.static_range(1, W):
        theirs = translate(factors + ctx.cur_rank, ctx.base, bases[distance - 1])
        ll_send(theirs + k, word, stamp, (k == 0) & leads)


@triton.jit
def recv_factors(ctx, factors, row_scales, apart, stamp, leads, W: tl.constexpr, LANES: tl.constexpr):
    """Store those of the other owners' rows. ``row_scales``: of the own row; the next one's is ``apart`` from it."""
    k = tl.arange(0, LANES)
    mask = (k < W) & (k != ctx.cur_rank) & leads
    words = ll_recv(ptrs=factors + k, stamp=stamp, mask=mask, source=k, record=ctx._record())
    away = (k - ctx.cur_rank).to(tl.int64) * apart
    tl.store(row_scales + away, tl.cast(words, tl.float32, bitcast=True), mask=mask)


@triton.jit(do_not_specialize=["rows", "apart"])
def sharded_rms_norm(
    channel, tensors, rows, apart, room, eps, W: tl.constexpr, DIVISION: tl.constexpr, LARGEST: tl.constexpr
):
    """``rows`` of each rank, of ``room``, have ``PIECES`` of ``PART`` elements.

    If a row has several pieces, each of them has a program, which has no other. ``channel``: a `ShardedNormChannel`.
    ``tensors``: a `NormTensors` of the own rows: those of the next rank lie ``apart`` rows after them, and so on.
    ``DIVISION``: a `RowDivision`, whose ``PIECE`` and ``BLOCK`` are the power of two from ``PART`` on.
    """
    H: tl.constexpr = DIVISION.H
    PIECES: tl.constexpr = DIVISION.PIECES
    PIECE: tl.constexpr = DIVISION.PIECE
    PART: tl.constexpr = DIVISION.PART
    BY_ROW: tl.constexpr = tensors.row_scales is not None
    ctx = DeviceContext.initialize(channel.context, num_ranks=W)
    rank, bases = ctx.cur_rank, peers(ctx, W)
    epochs, parts, results = channel.epochs, channel.parts, channel.results
    input, out = tensors.input, tensors.out
    meeting = open_meeting(PIECES, BY_ROW) if DIVISION.CLUSTERED else 0
    gdc_wait()
    if DIVISION.EARLY:
        gdc_launch_dependents()
    narrow: tl.constexpr = out.dtype.element_ty
    WORDS: tl.constexpr = PIECE // elements_per_word(narrow)
    places = room * PIECES
    first, stride = tl.program_id(0), tl.num_programs(0)
    piece = first % PIECES
    i = tl.arange(0, PIECE)
    begin = piece * PART
    count = tl.minimum(H - begin, PART)
    inside = i < count
    gain = widen(tl.load(tensors.weight + begin + i, mask=inside, other=0))
    divisor = tl.load(tensors.scale) if tensors.scale is not None else 1.0
    steps = (rows * PIECES - first + stride - 1) // stride
    entered = enter(meeting, PIECES, BY_ROW) if DIVISION.CLUSTERED else 0
    for step in range(0, steps + 2 * AHEAD):
        if step < steps:
            unit = first + step * stride
            row = unit // PIECES
            mine = region(parts, places, unit, tl.load(epochs + unit), REGION=W * PART) + rank * PART
            # All loads before all stores, which the compiler cannot know to be of other memory.
            sent = ()
            for distance in tl.static_range(1, W):
                away = ((rank + distance) % W - rank).to(tl.int64) * apart
                sent += (tl.load(input + (away + row) * H + begin + i, mask=inside),)  # type: ignore[assignment]
            for distance in tl.static_range(1, W):
                push(ctx, mine, i, sent[distance - 1], count=count, bases=bases, distance=distance, W=W)
        if (step >= AHEAD) & (step < steps + AHEAD):
            unit = first + (step - AHEAD) * stride
            row = unit // PIECES
            epoch = tl.load(epochs + unit)
            at = row.to(tl.int64) * H + begin + i
            own = tl.load(input + at, mask=inside)
            added = load_or_zero(tensors.residual, 0, at, inside)
            received = region(parts, places, unit, epoch, REGION=W * PART)
            event = ctx.tracing.begin_wait_for_data(received, rank)
            total = recv_and_reduce(ctx, received, own, count, W=W, PART=PART, OP="sum")
            ctx.tracing.record_event_end(event)
            x = tl.where(inside, widen(total), 0) + widen(added)
            keep_residual(tensors, at, inside, x)
            scaled = x * gain
            squares, heights = x * x, tl.abs(scaled) if BY_ROW else 0.0
            squares, peak = over_the_row(
                squares,
                heights,
                meeting,
                entered,
                partials=channel.partials + 2 * (unit - piece),
                piece=piece,
                stamp=epoch + 1,
                BY_ROW=BY_ROW,
                DIVISION=DIVISION,
                rank=rank,
                record=ctx._record(),
            )
            y, factor = normalise(
                tensors,
                scaled,
                divisor=divisor,
                squares=squares,
                peak=peak,
                row=row,
                leads=piece == 0,
                eps=eps,
                H=H,
                LARGEST=LARGEST,
            )
            place = region(results, places, unit, epoch, REGION=(W - 1) * PART)
            for distance in tl.static_range(1, W):
                # To that rank, this one is at the distance W - distance.
                theirs = place + (W - distance - 1) * PART
                push(ctx, theirs, i, y, count=count, bases=bases, distance=distance, W=W)
            # By way of the words that travel, so all ranks store the same bits. And what is converted to fp8, two
            # numbers in a register, has one use: beside the words, ptxas 12.8 (Triton 3.6) moved a store of single
            # bytes ahead of the conversion (`tests/codegen/converted_pairs.py`).
            tl.store(out + at, decode(encode(y), i, narrow), mask=inside)
            if BY_ROW:
                words = channel.factors + row * W
                send_factor(ctx, words, factor, epoch + 1, leads=piece == 0, bases=bases, W=W, LANES=DIVISION.LANES)
        if step >= 2 * AHEAD:
            unit = first + (step - 2 * AHEAD) * stride
            row = unit // PIECES
            epoch = tl.load(epochs + unit)
            place = region(results, places, unit, epoch, REGION=(W - 1) * PART)
            for distance in tl.static_range(1, W):
                owner = (rank + distance) % W
                theirs = place + (distance - 1) * PART
                event = ctx.tracing.begin_wait_for_data(theirs, rank)
                (words,) = lamport_recv(
                    theirs,
                    -1,
                    count,
                    WORDS=WORDS,
                    PARTS=1,
                    STRIDE=WORDS,
                    element=narrow,
                    record=ctx._record(),
                    source=owner,
                )
                ctx.tracing.record_event_end(event)
                away = (owner - rank).to(tl.int64) * apart
                tl.store(out + (away + row) * H + begin + i, decode(words, i, narrow), mask=inside)
            if BY_ROW:
                recv_factors(
                    ctx,
                    channel.factors + row * W,
                    tensors.row_scales + row,
                    apart,
                    stamp=epoch + 1,
                    leads=piece == 0,
                    W=W,
                    LANES=DIVISION.LANES,
                )
            old = region(parts, places, unit, epoch + (SLOTS - 1), REGION=W * PART)
            for distance in tl.static_range(1, W):
                lamport_clear(old + (rank + distance) % W * PART + i, i < PART)
            old = region(results, places, unit, epoch + (SLOTS - 1), REGION=(W - 1) * PART)
            for distance in tl.static_range(1, W):
                lamport_clear(old + (distance - 1) * PART + i, i < PART)
            store_after_sync(epochs + unit, (epoch + 1) % SLOTS)
