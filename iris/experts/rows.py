"""How the rows of a dispatch travel, and the scale factors of fp8 rows.

Rows of fp8 have factors, float32: one a row, or one for each 128 elements. They travel beside the row. The sender may
quantize rows of a wider type to fp8: a factor is then the largest absolute value over fp8's largest number. Its own
rows then go by way of its region too, so that they are quantized once.

A program moves the rows of a step's tokens together, some columns at a time, so that the loads of many rows are under
way at once.
"""

import triton
import triton.language as tl

from iris.experts.routing import has_bit

# The smallest factor: a row of zeros is divided by it, too.
SMALLEST = tl.constexpr(1e-12)
NOT, BY_ROW, BY_BLOCK = tl.constexpr("not"), tl.constexpr("by row"), tl.constexpr("by block")
# Elements of a block that has a factor.
GROUP = 128


@triton.constexpr_function
def copied_columns(element, extents):
    """Columns of a row of these that a program copies at a time."""
    return min(1 << (extents.H - 1).bit_length(), extents.COPIED * 8 // element.primitive_bitwidth)


@triton.jit
def quantize_blocks(data, element: tl.constexpr, FORM: tl.constexpr):
    """Columns of rows, float32, quantized to ``element`` in blocks of GROUP; returns them, and each row's factors."""
    ROWS: tl.constexpr = data.shape[0]
    COLUMNS: tl.constexpr = data.shape[1]
    GROUP: tl.constexpr = FORM.GROUP
    groups = tl.reshape(data, (ROWS * COLUMNS // GROUP, GROUP))
    factors = tl.maximum(tl.max(tl.abs(groups), axis=1) / FORM.LARGEST, SMALLEST)
    narrow = tl.reshape((groups / factors[:, None]).to(element), (ROWS, COLUMNS))
    return narrow, tl.reshape(factors, (ROWS, COLUMNS // GROUP))


@triton.jit
def row_factors(rows, there, FORM: tl.constexpr, EXTENTS: tl.constexpr):
    """The factor of each whole row. ``rows``: where they begin, if they are ``there``."""
    STEP: tl.constexpr = EXTENTS.STEP
    peak = tl.zeros((STEP,), dtype=tl.float32)
    column = tl.arange(0, EXTENTS.BLOCK)
    for begin in range(0, EXTENTS.H, EXTENTS.BLOCK):
        data = load_columns(rows, there, begin + column, EXTENTS.H, other=0).to(tl.float32)
        peak = tl.maximum(peak, tl.max(tl.abs(data), axis=1))
    return tl.maximum(peak / FORM.LARGEST, SMALLEST)


@triton.jit
def load_columns(rows, there, columns, WIDTH: tl.constexpr, other: tl.constexpr = None):
    """Columns of rows of ``WIDTH`` elements that begin at ``rows``, if they are ``there``, and ``other`` beyond."""
    return tl.load(rows[:, None] + columns[None, :], mask=there[:, None] & (columns < WIDTH)[None, :], other=other)


@triton.jit
def send_given_factors(ctx, scales, token, bits, FORM: tl.constexpr, EXTENTS: tl.constexpr):
    """Send the factors that rows came with to the other ranks of their ``bits``."""
    rank, i = ctx.cur_rank, tl.arange(0, FORM.LANES)
    own = tl.cast(token, tl.int64) * FORM.SCALES
    there = tl.cast(rank, tl.int64) * (EXTENTS.M * FORM.SCALES) + own
    factors = load_columns(scales.given + own, bits != 0, i, FORM.SCALES)
    for distance in range(1, EXTENTS.W):
        peer = (rank + distance) % EXTENTS.W
        mask = has_bit(bits, peer)[:, None] & (i < FORM.SCALES)[None, :]
        ctx.store(scales.sent + there[:, None] + i[None, :], factors, peer, mask=mask)


@triton.jit
def send_rows(
    ctx, slot, x, scales, found, token, bits, next_token, next_bits, FORM: tl.constexpr, EXTENTS: tl.constexpr
):
    """Send rows of this rank's tokens, and their factors, to the ranks of their ``bits``.

    Rows that are quantized go to this rank too. ``found``: their first columns, loaded before. Returns the first
    columns of the next tokens' rows, whose loads are under way then.
    """
    GROUP: tl.constexpr = FORM.GROUP
    BLOCK: tl.constexpr = EXTENTS.BLOCK
    QUANTIZED: tl.constexpr = FORM.QUANTIZE != NOT
    BLOCKED: tl.constexpr = FORM.QUANTIZE == BY_BLOCK
    element: tl.constexpr = slot.rows.dtype.element_ty
    rank, column = ctx.cur_rank, tl.arange(0, BLOCK)
    there = tl.cast(rank, tl.int64) * EXTENTS.M + token
    if QUANTIZED and not BLOCKED:
        factor = row_factors(x + tl.cast(token, tl.int64) * EXTENTS.H, bits != 0, FORM, EXTENTS)
    for begin in range(0, EXTENTS.H, BLOCK):
        # The next columns are under way while these are sent: after the last ones the next tokens' first ones.
        ends = begin + BLOCK >= EXTENTS.H
        later = load_columns(
            x + tl.cast(tl.where(ends, next_token, token), tl.int64) * EXTENTS.H,
            tl.where(ends, next_bits, bits) != 0,
            tl.where(ends, 0, begin + BLOCK) + column,
            EXTENTS.H,
            other=0,
        )
        columns = begin + column
        if BLOCKED:
            data, factors = quantize_blocks(found.to(tl.float32), element, FORM)
        elif QUANTIZED:
            data = (found.to(tl.float32) / factor[:, None]).to(element)
        else:
            data = found
        target = slot.rows + (there * EXTENTS.H)[:, None] + columns[None, :]
        for distance in range(0 if QUANTIZED else 1, EXTENTS.W):
            peer = (rank + distance) % EXTENTS.W
            sent = has_bit(bits, peer)[:, None]
            ctx.store(target, data, peer, mask=sent & (columns < EXTENTS.H)[None, :])
            if BLOCKED:
                group = begin // GROUP + tl.arange(0, BLOCK // GROUP)
                to = scales.sent + (there * FORM.SCALES)[:, None] + group[None, :]
                ctx.store(to, factors, peer, mask=sent & (group < FORM.SCALES)[None, :])
        found = later
    if QUANTIZED and not BLOCKED:
        for distance in range(0, EXTENTS.W):
            peer = (rank + distance) % EXTENTS.W
            ctx.store(scales.sent + there, factor, peer, mask=has_bit(bits, peer))
    if FORM.SCALES > 0 and not QUANTIZED:
        send_given_factors(ctx, scales, token=token, bits=bits, FORM=FORM, EXTENTS=EXTENTS)
    return found


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
def store_to_experts(to, rows, data, columns, WIDTH: tl.constexpr, K: tl.constexpr):
    """Columns of tokens' rows of ``WIDTH`` to ``rows`` of ``to``, a tuple with a block for each choice; -1 for none."""
    for choice in tl.static_range(K):
        target = to + (tl.cast(rows[choice], tl.int64) * WIDTH)[:, None] + columns[None, :]
        tl.store(target, data, mask=(rows[choice] >= 0)[:, None] & (columns < WIDTH)[None, :])


@triton.jit
def copy_rows(slot, x, scales, layout, token, source, rank, rows, FORM: tl.constexpr, EXTENTS: tl.constexpr):
    """Copy rows of rank ``source``, and their factors, to ``rows`` here, a tuple with those of each choice.

    -1 for none. An expert that was chosen twice has one row, which is copied twice.
    """
    K: tl.constexpr = EXTENTS.K
    H: tl.constexpr = EXTENTS.H
    SCALES: tl.constexpr = FORM.SCALES
    STAY: tl.constexpr = FORM.QUANTIZE == NOT
    BLOCK: tl.constexpr = copied_columns(slot.rows.dtype.element_ty, EXTENTS)
    is_own = source == rank
    row, own = tl.cast(source, tl.int64) * EXTENTS.M + token, tl.cast(token, tl.int64)
    there = rows[0] >= 0
    for choice in tl.static_range(1, K):
        there = there | (rows[choice] >= 0)
    if SCALES > 0:
        # Under way while rows are copied.
        group = tl.arange(0, FORM.LANES)
        given = scales.given + own * SCALES if STAY else None
        factors = load_own_or_sent(given, scales.sent + row * SCALES, is_own, there, columns=group, WIDTH=SCALES)
    # Own rows are read where they are, unless they were quantized.
    own_row = x + own * H if STAY else None
    for begin in range(0, H, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        data = load_own_or_sent(own_row, slot.rows + row * H, is_own, there, columns=columns, WIDTH=H)
        store_to_experts(layout.rows, rows, data, columns=columns, WIDTH=H, K=K)
    if SCALES > 0:
        store_to_experts(scales.placed, rows, factors, columns=group, WIDTH=SCALES, K=K)
