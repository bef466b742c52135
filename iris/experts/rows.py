"""How the rows of a dispatch travel, and the factors of narrow ones.

Rows of fp8 have factors, float32: one a row, or one for each 128 elements. They travel beside the row. Rows of a wider
type may be divided by such factors on the way, before they are sent: a factor is the largest absolute value over the
largest number of the narrow type. Own rows then pass through this rank's region, too, so that they are divided once.

A program moves the rows of a step's tokens together, some columns at a time, so that the loads of many rows are under
way at once.
"""

import triton
import triton.language as tl

from iris.experts.routing import choices, has_bit

# So that a row of zeros has a factor that divides.
SMALLEST = tl.constexpr(1e-12)
NOT, BY_ROW, BY_BLOCK = tl.constexpr("not"), tl.constexpr("by row"), tl.constexpr("by block")
# Elements of a block that has a factor.
GROUP = 128


@triton.constexpr_function
def copied_columns(element, extents):
    """Columns of a row of these that a program copies at a time."""
    return min(1 << (extents.H - 1).bit_length(), extents.COPIED * 8 // element.primitive_bitwidth)


@triton.jit
def divide_blocks(data, element: tl.constexpr, FORM: tl.constexpr):
    """Columns of rows, float32, in blocks with a factor each: as ``element``, and the factors of each row."""
    ROWS: tl.constexpr = data.shape[0]
    COLUMNS: tl.constexpr = data.shape[1]
    GROUP: tl.constexpr = FORM.GROUP
    groups = tl.reshape(data, (ROWS * COLUMNS // GROUP, GROUP))
    factors = tl.maximum(tl.max(tl.abs(groups), axis=1) / FORM.LARGEST, SMALLEST)
    narrow = tl.reshape((groups / factors[:, None]).to(element), (ROWS, COLUMNS))
    return narrow, tl.reshape(factors, (ROWS, COLUMNS // GROUP))


@triton.jit
def row_factors(rows, there, FORM: tl.constexpr, EXTENTS: tl.constexpr):
    """The one of each whole row. ``rows``: where they begin, if they are ``there``."""
    STEP: tl.constexpr = EXTENTS.STEP
    peak = tl.zeros((STEP,), dtype=tl.float32)
    column = tl.arange(0, EXTENTS.BLOCK)
    for begin in range(0, EXTENTS.H, EXTENTS.BLOCK):
        data = load_columns(rows, there, begin + column, EXTENTS.H, other=0).to(tl.float32)
        peak = tl.maximum(peak, tl.max(tl.abs(data), axis=1))
    return tl.maximum(peak / FORM.LARGEST, SMALLEST)


@triton.jit
def load_columns(rows, there, columns, WIDTH: tl.constexpr, other: tl.constexpr = None):
    """Columns of rows of so many that begin at ``rows``, if they are ``there``; behind the last one ``other``."""
    return tl.load(rows[:, None] + columns[None, :], mask=there[:, None] & (columns < WIDTH)[None, :], other=other)


@triton.jit
def send_narrow(ctx, slot, x, scales, token, bits, FORM: tl.constexpr, EXTENTS: tl.constexpr):
    """Divide rows, and send them and their factors to the ranks of their ``bits``, this one too."""
    element: tl.constexpr = slot.rows.dtype.element_ty
    GROUP: tl.constexpr = FORM.GROUP
    BLOCK: tl.constexpr = EXTENTS.BLOCK
    BLOCKED: tl.constexpr = FORM.QUANTIZE == BY_BLOCK
    rank, column, group = ctx.cur_rank, tl.arange(0, BLOCK), tl.arange(0, BLOCK // GROUP)
    rows = x + tl.cast(token, tl.int64) * EXTENTS.H
    there = tl.cast(rank, tl.int64) * EXTENTS.M + token
    goes = bits != 0
    if not BLOCKED:
        factor = row_factors(rows, goes, FORM, EXTENTS)
    for begin in range(0, EXTENTS.H, BLOCK):
        columns, first = begin + column, begin // GROUP + group
        inside, counted = (columns < EXTENTS.H)[None, :], (first < FORM.SCALES)[None, :]
        data = load_columns(rows, goes, columns, EXTENTS.H, other=0).to(tl.float32)
        if BLOCKED:
            narrow, factors = divide_blocks(data, element, FORM)
        else:
            narrow = (data / factor[:, None]).to(element)
            factors = factor[:, None] + 0.0 * group[None, :]
        for distance in range(0, EXTENTS.W):
            peer = (rank + distance) % EXTENTS.W
            sent = has_bit(bits, peer)[:, None]
            target = slot.rows + (there * EXTENTS.H)[:, None] + columns[None, :]
            ctx.store(target, narrow, peer, mask=sent & inside)
            target = scales.sent + (there * FORM.SCALES)[:, None] + first[None, :]
            ctx.store(target, factors, peer, mask=sent & counted)


@triton.jit
def send_as_they_are(ctx, slot, x, scales, token, bits, FORM: tl.constexpr, EXTENTS: tl.constexpr):
    """Send rows, and their factors if they have any, to the other ranks of their ``bits``."""
    SCALES: tl.constexpr = FORM.SCALES
    rank, column = ctx.cur_rank, tl.arange(0, EXTENTS.BLOCK)
    own = tl.cast(token, tl.int64)
    there = tl.cast(rank, tl.int64) * EXTENTS.M + token
    goes = (bits & ((1 << rank) ^ -1)) != 0
    rows = x + own * EXTENTS.H
    later = load_columns(rows, goes, column, EXTENTS.H)
    for begin in range(0, EXTENTS.H, EXTENTS.BLOCK):
        columns = begin + column
        inside = (columns < EXTENTS.H)[None, :]
        data = later
        # The next columns are under way while these are sent.
        later = load_columns(rows, goes, columns + EXTENTS.BLOCK, EXTENTS.H)
        for distance in range(1, EXTENTS.W):
            peer = (rank + distance) % EXTENTS.W
            target = slot.rows + (there * EXTENTS.H)[:, None] + columns[None, :]
            ctx.store(target, data, peer, mask=has_bit(bits, peer)[:, None] & inside)
    if SCALES > 0:
        i = tl.arange(0, FORM.LANES)
        inside = (i < FORM.SCALES)[None, :]
        factors = tl.load(scales.given + (own * FORM.SCALES)[:, None] + i[None, :], mask=goes[:, None] & inside)
        for distance in range(1, EXTENTS.W):
            peer = (rank + distance) % EXTENTS.W
            target = scales.sent + (there * FORM.SCALES)[:, None] + i[None, :]
            ctx.store(target, factors, peer, mask=has_bit(bits, peer)[:, None] & inside)


@triton.jit
def send_rows(ctx, slot, x, scales, token, bits, FORM: tl.constexpr, EXTENTS: tl.constexpr):
    """Send the rows of this rank's tokens, with ``bits`` for the ranks of their experts."""
    QUANTIZE: tl.constexpr = FORM.QUANTIZE
    if QUANTIZE == NOT:
        send_as_they_are(ctx, slot, x, scales, token=token, bits=bits, FORM=FORM, EXTENTS=EXTENTS)
    else:
        send_narrow(ctx, slot, x, scales, token=token, bits=bits, FORM=FORM, EXTENTS=EXTENTS)


@triton.jit
def load_own_or_sent(own, sent, is_own, there, columns, WIDTH: tl.constexpr):
    """Columns of rows that begin at ``sent``, or of this rank's at ``own``, which is None if its own were sent, too."""
    if own is None:
        data = load_columns(sent, there, columns, WIDTH)
    else:
        if is_own:
            data = load_columns(own, there, columns, WIDTH)
        else:
            data = load_columns(sent, there, columns, WIDTH)
    return data


@triton.jit
def copy_to_experts(to, rows, own, sent, is_own, WIDTH: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr):
    """Copy tokens' rows of ``WIDTH`` to ``rows`` of ``to``, a tuple with a block for each choice; -1 for none."""
    there = rows[0] >= 0
    for choice in tl.static_range(1, K):
        there = there | (rows[choice] >= 0)
    for begin in range(0, WIDTH, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        data = load_own_or_sent(own, sent, is_own, there, columns=columns, WIDTH=WIDTH)
        for choice in tl.static_range(K):
            target = to + (tl.cast(rows[choice], tl.int64) * WIDTH)[:, None] + columns[None, :]
            tl.store(target, data, mask=(rows[choice] >= 0)[:, None] & (columns < WIDTH)[None, :])


@triton.jit
def copy_rows(slot, x, scales, layout, token, source, rank, copied, FORM: tl.constexpr, EXTENTS: tl.constexpr):
    """Copy rows of rank ``source``, and their factors, to the rows ``copied``, one for each choice; -1 for none."""
    K: tl.constexpr = EXTENTS.K
    H: tl.constexpr = EXTENTS.H
    SCALES: tl.constexpr = FORM.SCALES
    LANES: tl.constexpr = FORM.LANES
    STAY: tl.constexpr = FORM.QUANTIZE == NOT
    BLOCK: tl.constexpr = copied_columns(slot.rows.dtype.element_ty, EXTENTS)
    k = choices(EXTENTS)
    there, own = tl.cast(source, tl.int64) * EXTENTS.M + token, tl.cast(token, tl.int64)
    rows = ()
    for choice in tl.static_range(K):
        rows += (tl.max(tl.where((k == choice)[None, :], copied, -1), axis=1),)
    # Own rows have not gone anywhere, unless they were divided.
    own_row = x + own * H if STAY else None
    copy_to_experts(layout.rows, rows, own_row, slot.rows + there * H, is_own=source == rank, WIDTH=H, BLOCK=BLOCK, K=K)
    if SCALES > 0:
        given = scales.given + own * SCALES if STAY else None
        sent = scales.sent + there * SCALES
        copy_to_experts(scales.placed, rows, given, sent, is_own=source == rank, WIDTH=SCALES, BLOCK=LANES, K=K)
