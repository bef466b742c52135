"""How the rows of a dispatch travel, and the factors of narrow ones.

Rows of fp8 have factors, float32: one a row, or one for each 128 elements. They travel beside the row. Rows of a wider
type may be divided by such factors on the way, before they are sent: a factor is the largest absolute value over the
largest number of the narrow type. Own rows then pass through this rank's region, too, so that they are divided once.
"""

import triton
import triton.language as tl

from iris.experts.routing import any_is, choices, chunk_of, load_choices, owners, signal_others

# So that a row of zeros has a factor that divides.
SMALLEST = tl.constexpr(1e-12)
NOT, BY_ROW, BY_BLOCK = tl.constexpr("not"), tl.constexpr("by row"), tl.constexpr("by block")
# Elements of a block that has a factor.
GROUP = 128


@triton.jit
def divide_blocks(data, element: tl.constexpr, FORM: tl.constexpr):
    """A block of a row, float32, in blocks with a factor each: as ``element``, and the factors."""
    WHOLE: tl.constexpr = data.shape[0]
    GROUP: tl.constexpr = FORM.GROUP
    groups = tl.reshape(data, (WHOLE // GROUP, GROUP))
    factors = tl.maximum(tl.max(tl.abs(groups), axis=1) / FORM.LARGEST, SMALLEST)
    return tl.reshape((groups / factors[:, None]).to(element), (WHOLE,)), factors


@triton.jit
def row_factor(row, FORM: tl.constexpr, EXTENTS: tl.constexpr):
    """The one of a whole row."""
    column = tl.arange(0, EXTENTS.BLOCK)
    peak = 0.0
    for begin in range(0, EXTENTS.H, EXTENTS.BLOCK):
        data = tl.load(row + begin + column, mask=begin + column < EXTENTS.H, other=0).to(tl.float32)
        peak = tl.maximum(peak, tl.max(tl.abs(data), axis=0))
    return tl.maximum(peak / FORM.LARGEST, SMALLEST)


@triton.jit
def send_narrow(ctx, slot, x, scales, token, owner, FORM: tl.constexpr, EXTENTS: tl.constexpr):
    """Divide a row, and send it and its factors to the ranks ``owner``, this one too."""
    element: tl.constexpr = slot.rows.dtype.element_ty
    GROUP: tl.constexpr = FORM.GROUP
    BLOCK: tl.constexpr = EXTENTS.BLOCK
    BLOCKED: tl.constexpr = FORM.QUANTIZE == BY_BLOCK
    rank, column, group = ctx.cur_rank, tl.arange(0, BLOCK), tl.arange(0, BLOCK // GROUP)
    row = x + tl.cast(token, tl.int64) * EXTENTS.H
    there = tl.cast(rank, tl.int64) * EXTENTS.M + token
    factor = 1.0 if BLOCKED else row_factor(row, FORM, EXTENTS)
    for begin in range(0, EXTENTS.H, BLOCK):
        inside = begin + column < EXTENTS.H
        data = tl.load(row + begin + column, mask=inside, other=0).to(tl.float32)
        if BLOCKED:
            narrow, factors = divide_blocks(data, element, FORM)
        else:
            narrow, factors = (data / factor).to(element), factor + 0 * group
        first = begin // GROUP + group
        mask = first < FORM.SCALES
        for distance in range(0, EXTENTS.W):
            peer = (rank + distance) % EXTENTS.W
            if any_is(owner, peer):
                ctx.store(slot.rows + there * EXTENTS.H + begin + column, narrow, peer, mask=inside)
                ctx.store(scales.sent + there * FORM.SCALES + first, factors, peer, mask=mask)


@triton.jit
def send_as_it_is(ctx, slot, x, scales, token, owner, FORM: tl.constexpr, EXTENTS: tl.constexpr):
    """Send a row, and its factors if it has any, to the other ranks among ``owner``."""
    SCALES: tl.constexpr = FORM.SCALES
    rank, column = ctx.cur_rank, tl.arange(0, EXTENTS.BLOCK)
    row = x + tl.cast(token, tl.int64) * EXTENTS.H
    there = tl.cast(rank, tl.int64) * EXTENTS.M + token
    for begin in range(0, EXTENTS.H, EXTENTS.BLOCK):
        inside = begin + column < EXTENTS.H
        data = tl.load(row + begin + column, mask=inside)
        for distance in range(1, EXTENTS.W):
            peer = (rank + distance) % EXTENTS.W
            if any_is(owner, peer):
                ctx.store(slot.rows + there * EXTENTS.H + begin + column, data, peer, mask=inside)
    if SCALES > 0:
        i = tl.arange(0, FORM.LANES)
        factors = tl.load(scales.given + tl.cast(token, tl.int64) * FORM.SCALES + i, mask=i < FORM.SCALES)
        for distance in range(1, EXTENTS.W):
            peer = (rank + distance) % EXTENTS.W
            if any_is(owner, peer):
                ctx.store(scales.sent + there * FORM.SCALES + i, factors, peer, mask=i < FORM.SCALES)


@triton.jit
def send_rows(ctx, slot, x, scales, topk_ids, tokens, call, FORM: tl.constexpr, EXTENTS: tl.constexpr):
    """Step 2 of `iris.experts.dispatch`."""
    QUANTIZE: tl.constexpr = FORM.QUANTIZE
    rank, program = ctx.cur_rank, tl.program_id(0)
    first, last = chunk_of(tokens, program)
    if FORM.MOVES:
        for token in range(first, last):
            owner = owners(load_choices(topk_ids, token, EXTENTS), EXTENTS)
            if QUANTIZE == NOT:
                send_as_it_is(ctx, slot, x, scales, token=token, owner=owner, FORM=FORM, EXTENTS=EXTENTS)
            else:
                send_narrow(ctx, slot, x, scales, token=token, owner=owner, FORM=FORM, EXTENTS=EXTENTS)
    signal_others(ctx, slot.sent + rank * tl.num_programs(0) + program, call)


@triton.jit
def copy_row(slot, x, scales, layout, token, source, rank, copied, FORM: tl.constexpr, EXTENTS: tl.constexpr):
    """Copy one row, and its factors, to the rows ``copied``, an element for each choice; -1 for none."""
    K: tl.constexpr = EXTENTS.K
    SCALES: tl.constexpr = FORM.SCALES
    QUANTIZE: tl.constexpr = FORM.QUANTIZE
    k, column, i = choices(EXTENTS), tl.arange(0, EXTENTS.BLOCK), tl.arange(0, FORM.LANES)
    there, own = tl.cast(source, tl.int64) * EXTENTS.M + token, tl.cast(token, tl.int64)
    for begin in range(0, EXTENTS.H, EXTENTS.BLOCK):
        inside = begin + column < EXTENTS.H
        # Own rows have not gone anywhere, unless they were divided.
        if QUANTIZE != NOT:
            data = tl.load(slot.rows + there * EXTENTS.H + begin + column, mask=inside)
        elif source == rank:
            data = tl.load(x + own * EXTENTS.H + begin + column, mask=inside)
        else:
            data = tl.load(slot.rows + there * EXTENTS.H + begin + column, mask=inside)
        for choice in tl.static_range(K):
            row = tl.sum(tl.where(k == choice, copied + 1, 0), axis=0) - 1
            if row >= 0:
                target = tl.cast(row, tl.int64) * EXTENTS.H + begin + column
                tl.store(layout.rows + target, data, mask=inside)
    if SCALES > 0:
        mask = i < FORM.SCALES
        if QUANTIZE != NOT:
            factors = tl.load(scales.sent + there * FORM.SCALES + i, mask=mask)
        elif source == rank:
            factors = tl.load(scales.given + own * FORM.SCALES + i, mask=mask)
        else:
            factors = tl.load(scales.sent + there * FORM.SCALES + i, mask=mask)
        for choice in tl.static_range(K):
            row = tl.sum(tl.where(k == choice, copied + 1, 0), axis=0) - 1
            if row >= 0:
                tl.store(scales.placed + tl.cast(row, tl.int64) * FORM.SCALES + i, factors, mask=mask)


@triton.jit
def copy_rows(slot, x, scales, layout, source, rank, start, FORM: tl.constexpr, EXTENTS: tl.constexpr):
    """Copy the rows of this program's share of the tokens of rank ``source`` to their experts.

    ``start``: the row where the first of them goes, by expert.
    """
    first, last = chunk_of(tl.load(slot.tokens + source), tl.program_id(0))
    expert, k = tl.arange(0, EXTENTS.LOCALS), choices(EXTENTS)
    for token in range(first, last):
        there = tl.cast(source, tl.int64) * EXTENTS.M + token
        chosen = load_choices(slot.ids, there, EXTENTS)
        local = tl.where(owners(chosen, EXTENTS) == rank, chosen - rank * EXTENTS.LOCAL, -1)
        is_expert = local[:, None] == expert[None, :]
        place = tl.where(local >= 0, tl.sum(tl.where(is_expert, start[None, :], 0), axis=1), -1)
        start += tl.max(is_expert.to(tl.int32), axis=0)
        tl.store(layout.places + there * EXTENTS.K + k, place, mask=k < EXTENTS.K)
        if FORM.MOVES:
            # The row of an expert that was chosen twice is copied for the first choice.
            again = (local[:, None] == local[None, :]) & (k[:, None] > k[None, :])
            copied = tl.where(tl.max(again.to(tl.int32), axis=1) > 0, -1, place)
            if tl.max(copied, axis=0) >= 0:
                copy_row(
                    slot,
                    x,
                    scales,
                    layout,
                    token=token,
                    source=source,
                    rank=rank,
                    copied=copied,
                    FORM=FORM,
                    EXTENTS=EXTENTS,
                )
