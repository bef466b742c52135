"""out = RMSNorm(sum of all ranks' input + residual), in the all-reduce's own pass over the data.

The sum of `iris.ccl.one_shot`, by rows: who has received a part of a row has it in registers, adds the
residual, and needs only the mean of the row's squares to write the normalised part. So the row is neither written nor
read in between, and nothing is launched after the all-reduce. Over the link, as there. *One shot*: W - 1 times the
bytes, in one step; *two shot*: 2 (W - 1) / W times the bytes, in two, of which the second sends the sums: each rank
normalises every row, which costs less than to send both the normalised row and the residual.

Of few rows each has several programs, which would else leave most multiprocessors idle, and a program that did all of a
row would be slower than the link. Each of them adds up its piece, and they tell each other the sum of its squares: in
the shared memory of their cluster (`iris.language.cluster`), or else by LL messages (`iris.language.ll`) with
the number of the epoch as their flag. Every call that has the row writes the word and reads it in the
same launch, so what is there before has another number.

Slots, epochs and why three of them are in order: see `iris.ccl.one_shot`, with a piece of a row for a block.
A residual is read by the one program that writes it.

A sum is rounded to the input's type, as an all-reduce would, and what follows is computed in float32.
"""

import triton
import triton.language as tl

from iris.ccl.combine import PROPAGATE
from iris.ccl.lamport_channel import SLOTS
from iris.ccl.one_shot import peers, push, recv_and_reduce, region
from iris.language.cluster import cluster_all_reduce, enter, open_meeting
from iris.language.context import DeviceContext
from iris.language.dependent_launch import gdc_launch_dependents, gdc_launch_dependents_after_waits, gdc_wait
from iris.language.lamport import decode, elements_per_word, lamport_clear, lamport_recv, lamport_send
from iris.language.ll import ll_recv, ll_send
from iris.language.ordering import store_after_sync
from iris.language.pairs import widen

# Rows that a program of the two-shot kernel sends before it waits for the first of them.
AHEAD = tl.constexpr(1)

# Elements in a row that the compiler may give to a thread: 16 bytes of bf16 and fp16. Of an fp8 result it would take 16
# elements. Then all threads exchanged what they had, and Triton 3.6 waited for it three times, once for each layout.
# It is for `tl.max_contiguous`: a hint that stands where addresses are used, as what a function returns has none.
NEIGHBOURS = tl.constexpr(8)


@triton.jit
def keep_residual(tensors, at, inside, x):
    """Store the sums and residuals ``x``. Before programs of a row meet, so that it is done while they do."""
    if tensors.residual is not None:
        tl.store(tensors.residual + at, x.to(tensors.residual.dtype.element_ty), mask=inside)


@triton.jit
def normalise(tensors, scaled, divisor, squares, peak, row, leads, eps, H: tl.constexpr, LARGEST: tl.constexpr):
    """What becomes of ``scaled``: sums and residuals x, times the weight.

    ``squares``: the sum of x * x over the row; ``peak``: the largest absolute value of ``scaled``; ``divisor``: the
    given scale. ``leads``: this program writes what a row has once. ``LARGEST``: of what ``out`` can hold, if that is
    fp8; else 0. Returns what the caller stores to ``out``, and the row's factor: 1 if it has none.
    """
    shrink = tl.rsqrt(squares / H + eps)
    factor = 1.0
    if tensors.row_scales is not None:
        # A row of zeros has any scale: one that divides. Of a row with a NaN ``shrink`` is one, and so is all of it.
        factor = tl.maximum(peak * shrink / LARGEST, 1e-12, propagate_nan=PROPAGATE)
        tl.store(tensors.row_scales + row, factor, mask=leads)
        y = scaled * (shrink / factor)
    else:
        y = scaled * shrink
    if tensors.scale is not None:
        y = y / divisor
    if LARGEST > 0:
        y = tl.maximum(y, -LARGEST, propagate_nan=PROPAGATE)
        y = tl.minimum(y, LARGEST, propagate_nan=PROPAGATE)
    return y.to(tensors.out.dtype.element_ty), factor


@triton.jit
def share(partials, value, piece, stamp, DIVISION: tl.constexpr, rank, record):
    """The float32 ``value`` of every program of a row, and zeros."""
    k = tl.arange(0, DIVISION.LANES)
    words = tl.cast(value, tl.int32, bitcast=True) + 0 * k
    ll_send(partials + k, words, stamp, k == piece)
    words = ll_recv(ptrs=partials + k, stamp=stamp, mask=k < DIVISION.PIECES, source=rank, record=record)
    return tl.where(k < DIVISION.PIECES, tl.cast(words, tl.float32, bitcast=True), 0)


@triton.jit
def sum_and_larger(square, height, other_square, other_height):
    return square + other_square, tl.maximum(height, other_height)


@triton.jit
def over_the_row(
    squares,
    heights,
    meeting,
    entered,
    partials,
    piece,
    stamp,
    BY_ROW: tl.constexpr,
    DIVISION: tl.constexpr,
    rank,
    record,
):
    """The sum of all pieces' ``squares``, and the largest of their ``heights``. ``partials``: the row's, for either."""
    PIECES: tl.constexpr = DIVISION.PIECES
    if DIVISION.CLUSTERED:
        total, peak = cluster_all_reduce(meeting, entered, squares, heights, PROGRAMS=PIECES, PEAKS=BY_ROW)
    else:
        if BY_ROW:
            total, peak = tl.reduce((squares, heights), 0, sum_and_larger)
        else:
            total, peak = tl.sum(squares, axis=0), 0.0
        if PIECES > 1:
            totals = share(partials, total, piece, stamp, DIVISION=DIVISION, rank=rank, record=record)
            total = tl.sum(totals, axis=0)
            if BY_ROW:
                peaks = share(partials + PIECES, peak, piece, stamp, DIVISION=DIVISION, rank=rank, record=record)
                peak = tl.max(peaks, axis=0)
    return total, peak


@triton.jit
def load_or_zero(pointer, at, mask):
    """Zeros if there is no tensor."""
    if pointer is not None:
        return tl.load(pointer + at, mask=mask, other=0)
    else:
        return (at * 0).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def one_shot_rms_norm(
    channel, tensors, rows, room, eps, W: tl.constexpr, DIVISION: tl.constexpr, LARGEST: tl.constexpr
):
    """A row has ``PIECES`` of ``PIECE`` elements, with a program each: they run at one time. ``rows``, of ``room``.

    ``channel``: a `NormChannel`. ``tensors``: a `NormTensors`. ``DIVISION``: a `RowDivision`.
    """
    H: tl.constexpr = DIVISION.H
    PIECES: tl.constexpr = DIVISION.PIECES
    PIECE: tl.constexpr = DIVISION.PIECE
    BY_ROW: tl.constexpr = tensors.row_scales is not None
    ctx = DeviceContext.initialize(channel.context, num_ranks=W)
    rank, bases = ctx.cur_rank, peers(ctx, W)
    epochs, partials, slots, input = channel.epochs, channel.partials, channel.slots, tensors.input
    meeting = open_meeting(PIECES, BY_ROW) if DIVISION.CLUSTERED else 0
    gdc_wait()
    if DIVISION.EARLY:
        gdc_launch_dependents()
    i = tl.arange(0, PIECE)
    for unit in range(tl.program_id(0), rows * PIECES, tl.num_programs(0)):
        row, piece = unit // PIECES, unit % PIECES
        columns = piece * PIECE + i
        inside = columns < H
        at = tl.max_contiguous(row.to(tl.int64) * H + columns, NEIGHBOURS)
        # All loads at once, before the first store and the waiting: what follows needs no other trip to memory.
        epoch = tl.load(epochs + unit)
        own = tl.load(input + at, mask=inside)
        added = load_or_zero(tensors.residual, at, inside)
        gain = tl.load(tensors.weight + columns, mask=inside, other=0)
        divisor = tl.load(tensors.scale) if tensors.scale is not None else 1.0
        parts = region(slots, room * PIECES, unit, epoch, REGION=W * PIECE)
        for distance in tl.static_range(1, W):
            push(ctx, parts + rank * PIECE, i, own, count=H - piece * PIECE, bases=bases, distance=distance, W=W)
        # While the data are under way. What the last call's slot held was read in that call.
        old = region(slots, room * PIECES, unit, epoch + (SLOTS - 1), REGION=W * PIECE)
        for distance in tl.static_range(1, W):
            lamport_clear(old + (rank + distance) % W * PIECE + i, i < PIECE)
        store_after_sync(epochs + unit, (epoch + 1) % SLOTS)
        entered = enter(meeting, PIECES, BY_ROW) if DIVISION.CLUSTERED else 0
        event = ctx.tracing.begin_wait_for_data(parts, rank)
        total = recv_and_reduce(ctx, parts, own, H - piece * PIECE, W=W, PART=PIECE, OP="sum")
        ctx.tracing.record_event_end(event)
        if not DIVISION.EARLY and unit + tl.num_programs(0) >= rows * PIECES:
            gdc_launch_dependents_after_waits()
        x = tl.where(inside, widen(total), 0) + widen(added)
        keep_residual(tensors, at, inside, x)
        scaled = x * widen(gain)
        squares, heights = x * x, tl.abs(scaled) if BY_ROW else 0.0
        squares, peak = over_the_row(
            squares,
            heights,
            meeting,
            entered,
            partials=partials + 2 * row * PIECES,
            piece=piece,
            stamp=epoch + 1,
            BY_ROW=BY_ROW,
            DIVISION=DIVISION,
            rank=rank,
            record=ctx._record(),
        )
        y, _ = normalise(
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
        tl.store(tensors.out + at, y, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def two_shot_rms_norm(
    channel, tensors, rows, room, eps, W: tl.constexpr, DIVISION: tl.constexpr, LARGEST: tl.constexpr
):
    """Rank d adds up the d-th ``PART`` elements of a piece, and sends the sums to all.

    ``PIECE`` and ``BLOCK`` are the powers of two from W * ``PART`` and ``PART`` on; the rest as above. If a row has
    several pieces, each of them has a program, which has no other.

    A piece's region is ``[2, W, PART]``: parts, then sums, which lie there as they do in the row. The own sum too, so
    that all of the piece is read from there.
    """
    H: tl.constexpr = DIVISION.H
    PIECES: tl.constexpr = DIVISION.PIECES
    PIECE: tl.constexpr = DIVISION.PIECE
    PART: tl.constexpr = DIVISION.PART
    BLOCK: tl.constexpr = DIVISION.BLOCK
    BY_ROW: tl.constexpr = tensors.row_scales is not None
    ctx = DeviceContext.initialize(channel.context, num_ranks=W)
    rank, bases = ctx.cur_rank, peers(ctx, W)
    epochs, partials, slots, input = channel.epochs, channel.partials, channel.slots, tensors.input
    meeting = open_meeting(PIECES, BY_ROW) if DIVISION.CLUSTERED else 0
    gdc_wait()
    if DIVISION.EARLY:
        gdc_launch_dependents()
    element: tl.constexpr = input.dtype.element_ty
    E: tl.constexpr = elements_per_word(element)
    REGION: tl.constexpr = 2 * W * PART
    i, j = tl.arange(0, BLOCK), tl.arange(0, PIECE)
    first, stride = tl.program_id(0), tl.num_programs(0)
    piece = first % PIECES
    begin = piece * W * PART
    inside = (j < W * PART) & (begin + j < H)
    gain = tl.load(tensors.weight + begin + j, mask=inside, other=0)
    divisor = tl.load(tensors.scale) if tensors.scale is not None else 1.0
    steps = (rows * PIECES - first + stride - 1) // stride
    entered = enter(meeting, PIECES, BY_ROW) if DIVISION.CLUSTERED else 0
    for step in range(0, steps + 2 * AHEAD):
        # Loaded long before it is wanted.
        done = first + (step - 2 * AHEAD) * stride
        at = tl.max_contiguous((done // PIECES).to(tl.int64) * H + begin + j, NEIGHBOURS)
        added = load_or_zero(tensors.residual, at, inside & (step >= 2 * AHEAD))
        if step < steps:
            unit = first + step * stride
            mine = region(slots, room * PIECES, unit, tl.load(epochs + unit), REGION=REGION) + rank * PART
            its = input + (unit // PIECES).to(tl.int64) * H
            # All loads before all stores, which the compiler cannot know to be of other memory.
            parts = ()
            for distance in tl.static_range(1, W):
                k = begin + (rank + distance) % W * PART + i
                parts += (tl.load(its + k, mask=(i < PART) & (k < H)),)
            for distance in tl.static_range(1, W):
                count = tl.minimum(H - begin - (rank + distance) % W * PART, PART)
                push(ctx, mine, i, parts[distance - 1], count=count, bases=bases, distance=distance, W=W)
        if (step >= AHEAD) & (step < steps + AHEAD):
            unit = first + (step - AHEAD) * stride
            parts = region(slots, room * PIECES, unit, tl.load(epochs + unit), REGION=REGION)
            k = begin + rank * PART + i
            mask = (i < PART) & (k < H)
            own = tl.load(input + (unit // PIECES).to(tl.int64) * H + k, mask=mask)
            count = tl.minimum(H - begin - rank * PART, PART)
            event = ctx.tracing.begin_wait_for_data(parts, rank)
            total = recv_and_reduce(ctx, parts, own, count, W=W, PART=PART, OP="sum")
            ctx.tracing.record_event_end(event)
            sums = parts + (W + rank) * PART
            lamport_send(sums, total, count)
            for distance in tl.static_range(1, W):
                push(ctx, sums, i, total, count=count, bases=bases, distance=distance, W=W)
        if step >= 2 * AHEAD:
            epoch = tl.load(epochs + done)
            sums = region(slots, room * PIECES, done, epoch, REGION=REGION) + W * PART
            # While the data are under way. What the last call's slot held was read in that call.
            old = region(slots, room * PIECES, done, epoch + (SLOTS - 1), REGION=REGION)
            for distance in tl.static_range(1, W):
                lamport_clear(old + (rank + distance) % W * PART + i, i < PART)
            lamport_clear(old + W * PART + j, j < W * PART)
            store_after_sync(epochs + done, (epoch + 1) % SLOTS)
            event = ctx.tracing.begin_wait_for_data(sums, rank)
            (words,) = lamport_recv(
                sums,
                -1,
                tl.minimum(H - begin, W * PART),
                WORDS=PIECE // E,
                PARTS=1,
                STRIDE=PART // E,
                element=element,
                record=ctx._record(),
            )
            ctx.tracing.record_event_end(event)
            x = tl.where(inside, widen(decode(words, j, element)), 0) + widen(added)
            keep_residual(tensors, at, inside, x)
            scaled = x * widen(gain)
            squares, heights = x * x, tl.abs(scaled) if BY_ROW else 0.0
            squares, peak = over_the_row(
                squares,
                heights,
                meeting,
                entered,
                partials=partials + 2 * (done - piece),
                piece=piece,
                stamp=epoch + 1,
                BY_ROW=BY_ROW,
                DIVISION=DIVISION,
                rank=rank,
                record=ctx._record(),
            )
            y, _ = normalise(
                tensors,
                scaled,
                divisor=divisor,
                squares=squares,
                peak=peak,
                row=done // PIECES,
                leads=piece == 0,
                eps=eps,
                H=H,
                LARGEST=LARGEST,
            )
            tl.store(tensors.out + at, y, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def rms_norm(tensors, rows, eps, H: tl.constexpr, ROW: tl.constexpr, LARGEST: tl.constexpr):
    """The same of sums that are there already, after an all-reduce of many rows; ``out`` may be ``input``.

    ``tensors``: a `NormTensors`. ``ROW``: the power of two from ``H`` on.
    """
    gdc_wait()
    j = tl.arange(0, ROW)
    inside = j < H
    gain = tl.load(tensors.weight + j, mask=inside, other=0).to(tl.float32)
    divisor = tl.load(tensors.scale) if tensors.scale is not None else 1.0
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = row.to(tl.int64) * H + j
        added = load_or_zero(tensors.residual, at, inside).to(tl.float32)
        x = tl.load(tensors.input + at, mask=inside, other=0).to(tl.float32) + added
        keep_residual(tensors, at, inside, x)
        scaled = x * gain
        peak = tl.max(tl.abs(scaled), axis=0) if tensors.row_scales is not None else 0.0
        y, _ = normalise(
            tensors,
            scaled,
            divisor=divisor,
            squares=tl.sum(x * x, axis=0),
            peak=peak,
            row=row,
            leads=True,
            eps=eps,
            H=H,
            LARGEST=LARGEST,
        )
        tl.store(tensors.out + at, y, mask=inside)
