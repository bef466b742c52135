"""A token's rows on this rank, added up: what combine and combine in stages share.

A program adds up one token's rows at a time, a *piece* of some columns of one row after the other. The next pieces are
under way meanwhile: of this sum's rows, and after these of the next sum's. A choice whose expert is elsewhere has no
piece: of many tokens these are half of the choices and more.
"""

import triton
import triton.language as tl

from iris.language.target import threads_per_warp

# Whether rows are multiplied: not at all, by weights that came with the dispatch, or by such as are given now.
UNWEIGHTED, DISPATCHED, GIVEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.constexpr_function
def added_columns(extents):
    """Columns that a program adds up at a time: as many a thread where warps have 64 of these."""
    return min(1 << (extents.H - 1).bit_length(), extents.ADDED * threads_per_warp() // 32)


@triton.jit
def load_places(places, token, there, EXTENTS: tl.constexpr):
    """For each choice of a token, or of a block of them, its row on this rank, -1 for none; a tuple.

    ``token``: its number among the tokens of all ranks, if it is ``there``.
    """
    K: tl.constexpr = EXTENTS.K
    rows = ()
    for choice in tl.static_range(K):
        rows += (tl.load(places + tl.cast(token, tl.int64) * EXTENTS.K + choice, mask=there, other=-1),)
    return rows


@triton.jit
def places_of(slot, places, token, there, WEIGHTS: tl.constexpr, EXTENTS: tl.constexpr):
    """For each choice of a token, its row on this rank, -1 for none, and its weight; two tuples.

    ``token``: its number among the tokens of all ranks, if it is ``there``.
    """
    K: tl.constexpr = EXTENTS.K
    rows, weights = load_places(places, token, there, EXTENTS), ()
    for choice in tl.static_range(K):
        at = tl.cast(token, tl.int64) * EXTENTS.K + choice
        if WEIGHTS == UNWEIGHTED:
            weights += (1.0,)
        else:
            # That of a choice whose expert is elsewhere may be no number.
            weights += (tl.where(rows[choice] >= 0, tl.load(slot.weights + at, mask=there, other=0.0), 0.0),)
    return rows, weights


@triton.jit
def number_of(rows, K: tl.constexpr):
    """How many of a token's rows are on this rank."""
    number = 0
    for choice in tl.static_range(K):
        number += (rows[choice] >= 0).to(tl.int32)
    return number


@triton.jit
def nth_row(chosen, n, K: tl.constexpr):
    """The ``n``-th of a token's rows on this rank, in the order of its choices, and its weight.

    -1 and 0 if it has not got so many here. ``chosen``: of `places_of`.
    """
    rows, weights = chosen
    row, weight, before = -1, 0.0, 0
    for choice in tl.static_range(K):
        is_it = (rows[choice] >= 0) & (before == n)
        row = tl.where(is_it, rows[choice], row)
        weight = tl.where(is_it, weights[choice], weight)
        before += (rows[choice] >= 0).to(tl.int32)
    return row, weight


@triton.jit
def load_piece(y, row, start, EXTENTS: tl.constexpr):
    """The columns from ``start`` on of a row; of row -1 zeros."""
    columns = start + tl.arange(0, added_columns(EXTENTS))
    at = tl.cast(row, tl.int64) * EXTENTS.H + columns
    return tl.load(y + at, mask=(row >= 0) & (columns < EXTENTS.H), other=0)


@triton.jit
def first_pieces(y, chosen, AHEAD: tl.constexpr, EXTENTS: tl.constexpr):
    """The first columns of the first ``AHEAD`` of a token's rows on this rank, and their weights: what is under way.

    ``chosen``: of `places_of`.
    """
    found, factors = (), ()
    for n in tl.static_range(AHEAD):
        row, weight = nth_row(chosen, n, EXTENTS.K)
        found += (load_piece(y, row, 0, EXTENTS),)
        factors += (weight,)
    return found, factors


@triton.jit
def add_up(y, under_way, chosen, next_chosen, start, WEIGHTS: tl.constexpr, EXTENTS: tl.constexpr):
    """The sum of a token's rows in the columns from ``start`` on, float32, in the order of its choices.

    ``chosen``: of `places_of`, this token's and that of the next one. ``under_way``: of `first_pieces`. After the sum
    that of what is added up next is returned: of the next columns of the same rows, or of the next token's first ones.

    Each round adds up as many pieces as are under way. After each of them the one of the next round is loaded, and not
    before: so it gets the registers of that. Else registers would be moved at the end of a round, which waits for what
    was loaded last, and no more than one piece would be under way.
    """
    K: tl.constexpr = EXTENTS.K
    ADDED: tl.constexpr = added_columns(EXTENTS)
    found, factors = under_way
    AHEAD: tl.constexpr = len(found)
    ends = start + ADDED >= EXTENTS.H
    total = tl.zeros((ADDED,), dtype=tl.float32)
    # One at least, for the loads that come after it.
    rounds = tl.maximum((number_of(chosen[0], K) + AHEAD - 1) // AHEAD, 1)
    for round in range(rounds):
        last = round + 1 == rounds
        next_start = tl.where(last, tl.where(ends, 0, start + ADDED), start)
        for n in tl.static_range(AHEAD):
            row, weight = nth_row(chosen, (round + 1) * AHEAD + n, K)
            first, first_weight = nth_row(chosen, n, K)
            next_first, next_weight = nth_row(next_chosen, n, K)
            row = tl.where(last, tl.where(ends, next_first, first), row)
            weight = tl.where(last, tl.where(ends, next_weight, first_weight), weight)
            piece = found[0].to(tl.float32)
            if WEIGHTS != UNWEIGHTED:
                piece *= factors[0]
            total += piece
            found = found[1:] + (load_piece(y, row, next_start, EXTENTS),)
            factors = factors[1:] + (weight,)
    return total, (found, factors)


@triton.jit
def sum_of_rows(y, rows, weights, columns, WEIGHTS: tl.constexpr, EXTENTS: tl.constexpr):
    """The same of all choices at once, without those of another token: in combine in stages, where tokens are few."""
    K: tl.constexpr = EXTENTS.K
    found = ()
    for choice in tl.static_range(K):
        at = tl.cast(rows[choice], tl.int64) * EXTENTS.H + columns
        found += (tl.load(y + at, mask=(rows[choice] >= 0) & (columns < EXTENTS.H), other=0),)
    total = tl.zeros(found[0].shape, dtype=tl.float32)
    for choice in tl.static_range(K):
        row = found[choice].to(tl.float32)
        if WEIGHTS != UNWEIGHTED:
            row *= weights[choice]
        total += row
    return total
