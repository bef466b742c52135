"""A token's rows on this rank, added up: what combine and combine in stages share.

A program adds up one token's rows at a time, a *piece* of some columns of one row behind the other. The next pieces are
under way meanwhile: of this sum's rows, and behind these of the next sum's. A choice whose expert is elsewhere has no
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
def is_here(rows, K: tl.constexpr):
    """Whether a token has any rows on this rank."""
    here = rows[0] >= 0
    for choice in tl.static_range(1, K):
        here = here | (rows[choice] >= 0)
    return here


@triton.jit
def pieces_of(rows, EXTENTS: tl.constexpr):
    """How many of a token's rows are on this rank, and as many as are under way at once at least."""
    K: tl.constexpr = EXTENTS.K
    number = 0
    for choice in tl.static_range(K):
        number += (rows[choice] >= 0).to(tl.int32)
    return tl.maximum(number, EXTENTS.AHEAD)


@triton.jit
def nth_row(rows, weights, n, K: tl.constexpr):
    """The ``n``-th of a token's rows on this rank, in the order of its choices, and its weight.

    -1 and 0 if it has not got so many here.
    """
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
def first_pieces(y, rows, weights, start, EXTENTS: tl.constexpr):
    """The first of a token's rows on this rank, from column ``start`` on, and their weights: what is under way."""
    AHEAD: tl.constexpr = EXTENTS.AHEAD
    found, factors = (), ()
    for n in tl.static_range(AHEAD):
        row, weight = nth_row(rows, weights, n, EXTENTS.K)
        found += (load_piece(y, row, start, EXTENTS),)
        factors += (weight,)
    return found, factors


@triton.jit
def behind(rows, weights, start, next_rows, next_weights, EXTENTS: tl.constexpr):
    """What is added up behind the columns from ``start`` on: the next ones of the same rows, or the next token's."""
    K: tl.constexpr = EXTENTS.K
    ADDED: tl.constexpr = added_columns(EXTENTS)
    ends = start + ADDED >= EXTENTS.H
    rows_behind, weights_behind = (), ()
    for choice in tl.static_range(K):
        rows_behind += (tl.where(ends, next_rows[choice], rows[choice]),)
        weights_behind += (tl.where(ends, next_weights[choice], weights[choice]),)
    return rows_behind, weights_behind, tl.where(ends, 0, start + ADDED)


@triton.jit
def add_up(
    y, found, factors, rows, weights, next_rows, next_weights, start, WEIGHTS: tl.constexpr, EXTENTS: tl.constexpr
):
    """The sum of a token's rows in the columns from ``start`` on, float32, in the order of its choices.

    ``found``, ``factors``: of `first_pieces`. Behind the sum those of what is added up next are returned.
    """
    K: tl.constexpr = EXTENTS.K
    AHEAD: tl.constexpr = EXTENTS.AHEAD
    rows_behind, weights_behind, start_behind = behind(
        rows, weights, start=start, next_rows=next_rows, next_weights=next_weights, EXTENTS=EXTENTS
    )
    total = tl.zeros((added_columns(EXTENTS),), dtype=tl.float32)
    pieces = pieces_of(rows, EXTENTS)
    for n in range(pieces):
        # While one piece is added up, the next ones are under way: of this sum, and then of the next.
        row, weight = nth_row(rows, weights, n + AHEAD, K)
        for other in tl.static_range(AHEAD):
            row_behind, weight_behind = nth_row(rows_behind, weights_behind, other, K)
            is_it = n + AHEAD == pieces + other
            row, weight = tl.where(is_it, row_behind, row), tl.where(is_it, weight_behind, weight)
        later = load_piece(y, row, tl.where(n + AHEAD >= pieces, start_behind, start), EXTENTS)
        piece = found[0].to(tl.float32)
        if WEIGHTS != UNWEIGHTED:
            piece *= factors[0]
        total += piece
        found, factors = found[1:] + (later,), factors[1:] + (weight,)
    return total, found, factors


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
