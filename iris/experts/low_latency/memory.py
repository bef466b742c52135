"""The memory of dispatches and combines of few tokens, and why each word may be written when it is.

Here nothing is fenced, and no flag follows data. Words that are counted or chosen by are LL messages, 4 bytes of data
beside 4 of a stamp (`iris.language.ll`); rows are Lamport messages, whose elements are not zero when they have arrived
(`iris.language.lamport`). So each message takes one trip over the link, and depends on no other.

W ranks, P programs on each, K choices, M tokens of a rank at most, LOCAL experts on each. S programs share a token,
each with a slice of its row, so that P / S tokens of a rank are served at a time; where the table says of program p
what tokens are meant, these are its own, and its slices of them. Program p of every rank serves the same tokens and
slices. ROW is the words of 4 bytes of a row, rounded up to 16 bytes; dispatch n, and the combine of it, are the n-th of
the slot:

    name      shape          words     who writes it, on which ranks               who reads it, on that rank
    calls     [P]            int32     program p of dispatch, its own              program p of both
    tokens    [1]            int32     program 0 of dispatch, its own              combine
    begins    [P, LOCAL]     int32     program p of dispatch, its own              the same
    found     [P, W, K]      int32     program p of dispatch, its own              the same
    over      [W]            LL, n     program 0 of combine on rank d, on others   program 0 of combine
    choices   [W, M, K]      LL, n     rank s's dispatch, of its tokens, on all    dispatch; of own tokens combine
    counts    [W, LOCAL]     LL, n     rank s's dispatch, where experts are        every program of dispatch
    sent      [W, M, K]      LL, n     rank s's dispatch, its weights, on all      dispatch
    weights   [W, M, K]      float32   dispatch, its own copy of ``sent``          combine
    given     [W, M, K]      LL, n     rank s's combine, its weights, on others    combine
    rows      [W, M, ROW]    Lamport   rank s's dispatch, where experts are        dispatch, which clears it
    partials  [W, M, ROW]    Lamport   rank d's combine, on the token's rank       combine, which clears it

A slice of ``rows`` and ``partials`` is written by program p of one rank, and read and cleared by program p of another:
no two programs clear, or wait for, the same word. Rows of fp8 are shorter, and lie in the first part of ``rows``; their
factors lie after all of them, Lamport messages too, those of each slice in vectors of 16 bytes of their own. LL words
are not cleared, so that any number of programs may read them.

Who reads a word waits for it: until its stamp is n, or its elements are not zero. So only this is to be shown: no word
is written anew before all have read the old one; and Lamport's memory is zero when it is written.

1. *Between two dispatches.* Dispatch n + 1 of rank s is a launch after combine n of s. Its program 0 has waited for
   the word n of ``over[d]`` of each other rank d. This d has sent when its combine n began, a launch after its
   dispatch n. So whatever d's dispatch n has read of ``choices``, ``counts``, ``sent`` and ``rows``, and cleared, it
   has before s writes it anew. In combine d reads of these only its own tokens' choices, which it writes itself.
2. *Between two combines.* Combine n + 1 of d is a launch after its dispatch n + 1, which has waited for ``counts`` of
   every other rank s. They were sent by s's dispatch n + 1, a launch after its combine n. So whatever s's combine n
   has read of ``given``, ``partials`` and ``over``, and cleared, it has before d writes it anew.
3. *Without a combine* there is `Received.release`, which enqueues a barrier of all ranks after dispatch n. It does for
   dispatch n + 1 what 1. does, and nothing of 2. was written. The host gives a slot to another dispatch only then.
4. *Zero.* Memory is zero when it is made. Lamport's is written where the reader knows that it will be: a row goes to
   rank d, from a token with an expert there, and so d's dispatch, which knows the choices, reads and clears it; a sum
   comes from each rank with an expert of a token, and the token's combine reads and clears it. Both clear the whole
   vectors of 16 bytes that are sent. A call that a rank refuses has launched nothing there; and where a wait exceeds
   its time limit, the group is broken and makes no more calls.
5. A clear is a plain store of the reader's rank, and an older message is read there, too. Both are over when the launch
   is, before a word leaves for the rank that writes next. Its stores come to this GPU's L2 cache later. (That is the
   hardware, as in `iris.ccl.one_shot`. PTX's memory model would want releases and acquires for the words of 1 and 2.)
6. *Stamps.* ``choices`` and ``counts`` are written in each dispatch, so an old stamp is n - 1. ``sent`` is so only with
   weights, and ``over`` and ``given`` only in combines, of which there is none after a dispatch that is released. A
   stamp of any age could be n once more, 2^32 calls later. So in every dispatch whose number has 0 or 1 in its low 16
   bits all of these are written: ``sent`` with n, whether anybody waits for it or not; ``over`` and ``given`` with
   n - 1, by each program that has waited for ``counts`` of all ranks. Combine n - 1 of these is over then, by 2., so
   nobody waits for n - 1 any more, and combine n, a later launch of the same rank, writes after it. An old stamp is
   therefore less than 2^17 calls old.

A call is one launch, or with ``async_op=True`` two, of P programs each: step 1 of a dispatch alone, and after it the
others; of a combine what it sends, and after it what it receives. Both halves of dispatch n find n - 1 in ``calls``:
program p adds 1 at the end of the second one, and no other launch of the slot lies in between, since the host gives it
to no other dispatch before the second half of the combine is enqueued. Both halves of combine n find n, as they are
after the second half of the dispatch, which returns what a combine is given. "A launch after" dispatch n or combine n
is therefore after both halves. In 1. ``over`` is sent in the first half of combine n, and so after all that dispatch
n reads, and waited for in the second, which dispatch n + 1 comes after. In 2. ``counts`` is sent in the first half of
dispatch n + 1 of s, after all that its combine n reads, and waited for in the second half of that of d, which all of
d's combine n + 1 comes after. What is refreshed by 6. is written in second halves, after the same wait.

Who may wait for whom: a dispatch sends all that it has to send before it waits for anything. So does a combine, but for
sums by weights that are given: these it sends after the weights of others, which all have sent before they wait.

All of a rank's calls follow each other: on one stream, or on several that wait for each other.
"""

import torch
from triton import cdiv, next_power_of_2

from iris import simulator
from iris.experts.kernel_arguments import Extents, FewTokens
from iris.experts.rows import GROUP
from iris.language.target import architecture

# Where choices, W * M * K, are as many at most, and ranks.
MOST_PAIRS, MOST_RANKS = 4096, 8
# A token's number in its rank has so many bits in a word of ``choices``, and an expert's what is left.
MOST_TOKENS = 1 << 15
# Numbers that a program compares at a time, to count how often experts are chosen: 32 for each of 256 threads.
COMPARED = 8192
VECTOR = 16  # bytes
# Warps of a program, with a slice of up to so many bytes, and with more. A thread has two vectors of a slice, or fewer.
FEW_WARPS, SHORT, MANY_WARPS = 4, 4096, 8


def fits(extents: Extents) -> bool:
    """Whether calls of this size are for few tokens, where they may be."""
    return possible(extents) and extents.W * extents.M * extents.K <= MOST_PAIRS


def possible(extents: Extents) -> bool:
    """Not on CDNA3, whose fp8 has no second NaN: a row of it cannot be its own flag. Kernels are unrolled by ranks."""
    return architecture() != "gfx942" and extents.M <= MOST_TOKENS and extents.W <= MOST_RANKS


def few_tokens(extents: Extents, dtype: torch.dtype, warp: int) -> FewTokens:
    """For the same sizes; of as many programs at most as send there, of warps of so many threads."""
    W, M, H = extents.W, extents.M, extents.H
    tokens = min(extents.PROGRAMS, M)
    split = slices(H, extents.PROGRAMS // tokens)
    columns, programs = H // split, tokens * split
    num_warps = FEW_WARPS if columns * dtype.itemsize <= SHORT else MANY_WARPS
    threads = num_warps * warp
    share = cdiv(extents.E, programs)
    targets = next_power_of_2(extents.K + share)
    return FewTokens(
        W=W,
        E=extents.E,
        LOCAL=extents.LOCAL,
        K=extents.K,
        M=M,
        H=H,
        LOCALS=extents.LOCALS,
        CHOICES=extents.CHOICES,
        RANKS=extents.RANKS,
        SPLIT=split,
        COLUMNS=columns,
        PROGRAMS=programs,
        # A vector for each thread; blocks of factors of fp8 are whole.
        BLOCK=max(min(next_power_of_2(columns), VECTOR // dtype.itemsize * threads), VECTOR),
        SHARE=share,
        TARGETS=targets,
        TOKENS=min(next_power_of_2(M), max(1, COMPARED // targets)),
        AWAITED=extents.RANKS * max(extents.LOCALS, extents.CHOICES),
        THREADS=threads,
        # See `iris.language.lamport.lamport_recv`. In the simulator each program is one thread.
        WORDS=1 if simulator.ACTIVE else threads,
        CLEARED=min(VECTOR // 4 * threads, next_power_of_2(columns)),
    )


def slices(hidden: int, most: int) -> int:
    """How many programs share a row: a power of two. Each has whole blocks of fp8 with their factors, or all of it."""
    split = 1
    while 2 * split <= most and hidden % (2 * split * GROUP) == 0:
        split *= 2
    return split


def shapes(extents: FewTokens, dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """The parts of a slot, as the table has them."""
    W, M, K, programs = extents.W, extents.M, extents.K, extents.PROGRAMS
    row = (W, M, cdiv(extents.H * dtype.itemsize, VECTOR) * VECTOR // 4)
    words, pairs = torch.int64, (W, M, K)
    return {
        "calls": ((programs,), torch.int32),
        "tokens": ((1,), torch.int32),
        "begins": ((programs, extents.LOCAL), torch.int32),
        "found": ((programs, W, K), torch.int32),
        "over": ((W,), words),
        "choices": (pairs, words),
        "counts": ((W, extents.LOCAL), words),
        "sent": (pairs, words),
        "weights": (pairs, torch.float32),
        "given": (pairs, words),
        "rows": (row, torch.int32),
        "partials": (row, torch.int32),
    }
