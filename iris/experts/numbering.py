"""Which row each choice of a token gets: by two numbers, of which its own rank knows one, and the expert's the other.

Rows of an expert lie in the order of ranks and of their tokens. So a choice's row is where those of the expert begin,
plus as many rows as the tokens before this one have: of earlier ranks, of earlier programs of its rank, and of its own
program. The last is the choice's *number*. The program that sends counts it, once for all receivers, and it travels
with the expert in one word of 32 bits:

    expert + number E       the first choice of this expert by its token
    -2 - (expert + number E)  a further one, which has the same row
    -1                      none

Numbers are below M, and M E is below 2^31 (`iris.experts.checks`). The other part, *start*, depends on how many rows
all programs have by expert, their tallies. Each program that receives adds these up, for all of its tokens at once.

A program compares C = `Extents.COUNTED` tokens' choices with each other, C K at a time: (C K)^2 comparisons, where with
all experts it would be C K E. Between these it keeps its tally: a choice's number is that of its expert there, and how
many of the tokens before it among the C have the expert, too.
"""

import triton
import triton.language as tl

from iris.experts.routing import choices, of_rank


@triton.jit
def number_choices(expert, tally, EXTENTS: tl.constexpr):
    """The words of choices, and the tally with these.

    ``expert``: ``[COUNTED * CHOICES]``, of tokens that follow each other, -1 for none. ``tally``: ``[EXPERTS]``, the
    rows of this program's tokens before them by expert.
    """
    COUNTED: tl.constexpr = EXTENTS.COUNTED
    CHOICES: tl.constexpr = EXTENTS.CHOICES
    k, token = choices(EXTENTS), tl.arange(0, COUNTED * CHOICES) // CHOICES
    by_token = tl.reshape(expert, (COUNTED, CHOICES))
    equal = (by_token[:, :, None] == by_token[:, None, :]) & (k[:, None] > k[None, :])[None, :, :]
    again = tl.reshape(tl.max(equal.to(tl.int32), axis=2), (COUNTED * CHOICES,)) > 0
    first = tl.where(again, -1, expert)
    # The later ones in columns: a thread has few of these, and each of its sums is its own.
    before = (first[:, None] == expert[None, :]) & (token[:, None] < token[None, :])
    number = tl.gather(tally, tl.maximum(expert, 0), axis=0) + tl.sum(before.to(tl.int32), axis=0)
    word = expert + number * EXTENTS.E
    word = tl.where(expert >= 0, tl.where(again, -2 - word, word), -1)
    return word, tally + tl.histogram(tl.maximum(first, 0), EXTENTS.EXPERTS, mask=first >= 0)


@triton.jit
def load_words(slot, token, there, EXTENTS: tl.constexpr):
    """What ranks have sent of tokens, numbered among those of all ranks: a line each, if they are ``there``."""
    k = choices(EXTENTS)
    at = tl.cast(token, tl.int64)[:, None] * EXTENTS.K + k[None, :]
    return tl.load(slot.choices + at, mask=there[:, None] & (k < EXTENTS.K)[None, :], other=-1)


@triton.jit
def expert_and_number(word, EXTENTS: tl.constexpr):
    """Both -1 for none."""
    value = tl.where(word < -1, -2 - word, word)
    there = value >= 0
    return tl.where(there, value % EXTENTS.E, -1), tl.where(there, value // EXTENTS.E, -1)


@triton.jit
def load_sent_choices(slot, token, there, EXTENTS: tl.constexpr):
    """As `iris.experts.routing.load_choices`, of what ranks have sent. ``token``: among those of all ranks."""
    expert, _ = expert_and_number(load_words(slot, token, there, EXTENTS), EXTENTS)
    return expert


@triton.jit
def load_tallies(slot, source, begin, senders, EXTENTS: tl.constexpr):
    """Of programs from ``begin`` on, of the first ``senders`` of a rank: a line each."""
    expert, program = tl.arange(0, EXTENTS.LOCALS), begin + tl.arange(0, EXTENTS.TALLIES)
    at = (source * EXTENTS.PROGRAMS + program) * EXTENTS.LOCAL
    mask = (program < senders)[:, None] & (expert < EXTENTS.LOCAL)[None, :]
    return tl.load(slot.tallies + at[:, None] + expert[None, :], mask=mask, other=0)


@triton.jit
def add_tallies(slot, tokens, until, EXTENTS: tl.constexpr):
    """Rows from each rank to each local expert, of the tokens of programs before ``until``, and of all: two blocks
    ``[RANKS, LOCALS]``. ``tokens``: of each rank."""
    RANKS: tl.constexpr = EXTENTS.RANKS
    LOCALS: tl.constexpr = EXTENTS.LOCALS
    TALLIES: tl.constexpr = EXTENTS.TALLIES
    rank, line = tl.arange(0, RANKS), tl.arange(0, TALLIES)
    before = tl.zeros((RANKS, LOCALS), dtype=tl.int32)
    whole = tl.zeros((RANKS, LOCALS), dtype=tl.int32)
    for source in range(EXTENTS.W):
        # Programs without tokens have sent none.
        senders = tl.minimum(of_rank(tokens, source, EXTENTS), EXTENTS.PROGRAMS)
        early = tl.zeros((LOCALS,), dtype=tl.int32)
        every = tl.zeros((LOCALS,), dtype=tl.int32)
        for begin in range(0, senders, TALLIES):
            tally = load_tallies(slot, source, begin, senders, EXTENTS=EXTENTS)
            early += tl.sum(tl.where((begin + line < until)[:, None], tally, 0), axis=0)
            every += tl.sum(tally, axis=0)
        is_source = (rank == source)[:, None]
        before = tl.where(is_source, early[None, :], before)
        whole = tl.where(is_source, every[None, :], whole)
    return before, whole


@triton.jit
def first_rows(total, alignment, EXTENTS: tl.constexpr):
    """Where the rows of each local expert, ``total``, begin, and end with what is left free after them.

    ``alignment`` 0: each expert has room for all that may come. Else this depends on how many come.
    """
    LOCALS: tl.constexpr = EXTENTS.LOCALS
    rows = tl.zeros((LOCALS,), dtype=tl.int32) + EXTENTS.W * EXTENTS.M
    if alignment > 0:
        rows = (total + alignment - 1) // alignment * alignment
    rows = tl.where(tl.arange(0, LOCALS) < EXTENTS.LOCAL, rows, 0)
    end = tl.cumsum(rows, axis=0)
    return end - rows, end


@triton.jit
def rows_of(word, start, source, rank, EXTENTS: tl.constexpr):
    """The rows on this ``rank`` of choices of tokens of rank ``source``, a line each, -1 for none here.

    ``start``: ``[RANKS * LOCALS]``, the first row of each rank's tokens of this program for each local expert.
    """
    expert, number = expert_and_number(word, EXTENTS)
    local = expert - rank * EXTENTS.LOCAL
    here = (expert >= 0) & (local >= 0) & (local < EXTENTS.LOCAL)
    at = tl.where(here, source * EXTENTS.LOCALS + local, 0)
    begin = tl.reshape(tl.gather(start, tl.reshape(at, (word.numel,)), axis=0), word.shape)
    return tl.where(here, begin + number, -1)
