"""out = RMSNorm(sum of all ranks' input + residual), in the all-reduce's own pass over the data.

The sum of `iris.ccl.one_shot`, by rows: who has received a part of a row has it in registers, adds the
residual, and needs only the mean of the row's squares to write the normalised part. So the row is neither written nor
read in between, and nothing is launched after the all-reduce. Over the link, as there. *One shot*: W - 1 times the
bytes, in one step; *two shot*: 2 (W - 1) / W times the bytes, in two, of which the second sends the sums: each rank
normalises every row, which costs less than to send both the normalised row and the residual. Between two ranks that is
the same number of bytes, so these take one shot at any size, unless a row is too wide for a program's registers.

Of few rows each has several programs, which would else leave most multiprocessors idle, and a program that did all of a
row would be slower than the link. Each of them adds up its piece, and they tell each other the sum of its squares: in
the shared memory of their cluster (`iris.language.cluster`), or else by LL messages (`iris.language.ll`) with
the number of the epoch as their flag. Every call that has the row writes the word and reads it in the
same launch, so what is there before has another number.

Of many rows a program has several, each in whole. It sends the next row before it waits for this one, so that the link
is busy while it normalises. With two rows ahead, 14 MiB took 54 us between 2 H200, and 50 with one: a program whose
stores wait for the link receives nothing meanwhile.

Slots, epochs and why three of them are in order: see `iris.ccl.one_shot`, with a piece of a row for a block.
A residual is read by the one program that writes it.

A sum is rounded to the input's type, as an all-reduce would, and what follows is computed in float32.
"""

import triton
import triton.language as tl

from iris.ccl.lamport_channel import SLOTS
from iris.ccl.one_shot import peers, push, recv_and_reduce, region
from iris.language.cluster import enter, open_meeting
from iris.language.context import DeviceContext
from iris.language.dependent_launch import (
    gdc_launch_dependents,
    gdc_launch_dependents_after_waits,
    gdc_wait,
    gdc_wait_after,
)
from iris.language.lamport import decode, elements_per_word, lamport_clear, lamport_recv, lamport_send
from iris.language.ordering import store_after_sync
from iris.language.pairs import widen
from iris.ops.rms_norm import NEIGHBOURS, keep_residual, load_or_zero, normalise, over_the_row

# Rows that a program of the two-shot kernel sends before it waits for the first of them.
AHEAD = tl.constexpr(1)


@triton.constexpr_function
def places(size):
    """Parts that a region of one shot has room for: all ranks'; between two ranks the other one's alone."""
    return 1 if size == 2 else size


@triton.jit
def place(parts, source, W: tl.constexpr, PIECE: tl.constexpr):
    """Where a rank's part lies in the region ``parts`` of one shot."""
    return parts + source % places(W) * PIECE


@triton.jit
def begin_of(unit, DIVISION: tl.constexpr):
    """Where a piece begins, in a tensor of rows."""
    return (unit // DIVISION.PIECES).to(tl.int64) * DIVISION.H + unit % DIVISION.PIECES * DIVISION.PIECE


@triton.jit
def send_piece(ctx, channel, own, unit, epoch, room, bases, W: tl.constexpr, DIVISION: tl.constexpr):
    """Push ``own``, a piece of a row, to all other ranks."""
    PIECE: tl.constexpr = DIVISION.PIECE
    parts = region(channel.slots, room * DIVISION.PIECES, unit, epoch, REGION=places(W) * PIECE)
    mine, count = place(parts, ctx.cur_rank, W=W, PIECE=PIECE), DIVISION.H - unit % DIVISION.PIECES * PIECE
    for distance in tl.static_range(1, W):
        push(ctx, mine, tl.arange(0, PIECE), own, count=count, bases=bases, distance=distance, W=W)


@triton.jit
def send_row(ctx, channel, input, row, room, bases, W: tl.constexpr, DIVISION: tl.constexpr):
    """`send_piece` of a row that is one piece."""
    columns = tl.arange(0, DIVISION.PIECE)
    epoch = tl.load(channel.epochs + row)
    own = tl.load(input + begin_of(row, DIVISION) + columns, mask=columns < DIVISION.H)
    send_piece(ctx, channel, own, row, epoch=epoch, room=room, bases=bases, W=W, DIVISION=DIVISION)


@triton.jit
def sum_and_normalise(
    ctx,
    channel,
    tensors,
    unit,
    following,
    units,
    meeting,
    room,
    bases,
    eps,
    W: tl.constexpr,
    DIVISION: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Add up a piece from all ranks, and store what becomes of it.

    A program's only piece is sent here, too. One of several has been sent, and here the ``following`` one is, if it is
    below ``units``, the number of pieces.
    """
    H: tl.constexpr = DIVISION.H
    PIECES: tl.constexpr = DIVISION.PIECES
    PIECE: tl.constexpr = DIVISION.PIECE
    BY_ROW: tl.constexpr = tensors.row_scales is not None
    rank, epochs, slots = ctx.cur_rank, channel.epochs, channel.slots
    row, piece = unit // PIECES, unit % PIECES
    begin, i = begin_of(unit, DIVISION), tl.arange(0, PIECE)
    inside = i < H - piece * PIECE
    # All loads at once, before the first store and the waiting: what follows needs no other trip to memory.
    epoch = tl.load(epochs + unit)
    own = tl.load(tensors.input + begin + i, mask=inside)
    added = load_or_zero(tensors.residual, begin, i, inside)
    gain = tl.load(tensors.weight + piece * PIECE + i, mask=inside, other=0)
    divisor = tl.load(tensors.scale) if tensors.scale is not None else 1.0
    if DIVISION.ONE_EACH:
        send_piece(ctx, channel, own, unit, epoch=epoch, room=room, bases=bases, W=W, DIVISION=DIVISION)
        # Again: of elements that it has packed into the words to send, the compiler adds one at a time, not two.
        own = tl.load(tensors.input + begin + i, mask=inside)
    elif following < units:
        send_row(ctx, channel, tensors.input, following, room=room, bases=bases, W=W, DIVISION=DIVISION)
    # While the data are under way. What the last call's slot held was read in that call.
    old = region(slots, room * PIECES, unit, epoch + (SLOTS - 1), REGION=places(W) * PIECE)
    for distance in tl.static_range(1, W):
        lamport_clear(place(old, (rank + distance) % W, W=W, PIECE=PIECE) + i, i < PIECE)
    store_after_sync(epochs + unit, (epoch + 1) % SLOTS)
    entered = enter(meeting, PIECES, BY_ROW) if DIVISION.CLUSTERED else 0
    parts = region(slots, room * PIECES, unit, epoch, REGION=places(W) * PIECE)
    event = ctx.tracing.begin_wait_for_data(parts, rank)
    if W == 2:
        # It takes where part 0 would lie.
        parts -= (1 - rank) * PIECE
    total = recv_and_reduce(ctx, parts, own, H - piece * PIECE, W=W, PART=PIECE, OP="sum")
    ctx.tracing.record_event_end(event)
    if not DIVISION.EARLY and following >= units:
        gdc_launch_dependents_after_waits()
    x = tl.where(inside, widen(total), 0) + widen(added)
    at = tl.max_contiguous(begin + i, NEIGHBOURS)
    keep_residual(tensors, at, inside, x)
    scaled = x * widen(gain)
    squares, heights = x * x, tl.abs(scaled) if BY_ROW else 0.0
    squares, peak = over_the_row(
        squares,
        heights,
        meeting,
        entered,
        partials=channel.partials + 2 * row * PIECES,
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
def one_shot_rms_norm(
    channel, tensors, rows, room, eps, W: tl.constexpr, DIVISION: tl.constexpr, LARGEST: tl.constexpr
):
    """A row has ``PIECES`` of ``PIECE`` elements, with a program each: they run at one time. ``rows``, of ``room``.

    ``channel``: a `NormChannel`. ``tensors``: a `NormTensors`. ``DIVISION``: a `RowDivision`.

    Where a program has several pieces, they are whole rows.
    """
    BY_ROW: tl.constexpr = tensors.row_scales is not None
    ctx = DeviceContext.initialize(channel.context, num_ranks=W)
    bases = peers(ctx, W)
    meeting = open_meeting(DIVISION.PIECES, BY_ROW) if DIVISION.CLUSTERED else 0
    first, stride, units = tl.program_id(0), tl.num_programs(0), rows * DIVISION.PIECES
    begin = begin_of(first, DIVISION)
    addresses = (
        channel.epochs + first,
        tensors.input + begin,
        tensors.weight + first % DIVISION.PIECES * DIVISION.PIECE,
    )
    if tensors.residual is not None:
        addresses += (tensors.residual + begin,)
    gdc_wait_after(addresses)
    if DIVISION.EARLY:
        gdc_launch_dependents()
    if DIVISION.ONE_EACH:
        # Not as a loop of one turn: the assembler would compute addresses in it, after all.
        if first < units:
            sum_and_normalise(
                ctx,
                channel,
                tensors,
                first,
                following=units,
                units=units,
                meeting=meeting,
                room=room,
                bases=bases,
                eps=eps,
                W=W,
                DIVISION=DIVISION,
                LARGEST=LARGEST,
            )
    else:
        if first < units:
            send_row(ctx, channel, tensors.input, first, room=room, bases=bases, W=W, DIVISION=DIVISION)
        for unit in range(first, units, stride):
            sum_and_normalise(
                ctx,
                channel,
                tensors,
                unit,
                following=unit + stride,
                units=units,
                meeting=meeting,
                room=room,
                bases=bases,
                eps=eps,
                W=W,
                DIVISION=DIVISION,
                LARGEST=LARGEST,
            )


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
        added = load_or_zero(tensors.residual, 0, at, inside & (step >= 2 * AHEAD))
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
