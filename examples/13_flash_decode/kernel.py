"""Attention of one new token a sequence, whose keys and values are shared among the ranks, in one kernel.

A task is a chunk of the positions that this rank holds of one sequence (split-KV), for a group of query heads that use
one head of keys and values: all that do, or a part of them if that is what a program has room for. Its result is
partial: the mean of the values under the softmax of this chunk alone, and the log-sum-exp of its scores, which is the
logarithm of that softmax's denominator. From these, any number of partial results are combined exactly. Whichever
program ends the last chunk of a pair, of sequence and group, combines all of its chunks, and stores the result of this
rank to all ranks. A program that has no tasks left takes pairs of the output, waits until all ranks have sent theirs,
and combines them.

Every rank combines everything: one hop. To combine at an owner and gather what it has made would send fewer bytes, and
take a hop more, which costs more than bytes do in messages this small. What travels is float32.

Over the link, each rank: batch * heads * (dim + 1) words of 4 bytes, and a count for each pair, to every peer, in one
step; pairs travel one by one, as their last chunk ends.

``flash_decode_share`` and ``combine_shares`` are the same with the exchange left out, for a collective between them.
"""

import triton
import triton.language as tl

from iris import DeviceContext, TraceEvent
from iris.language.ordering import store_after_sync  # a store, after every warp's load of the same word

# A partial result is a row: the mean, then the log-sum-exp (LSE), to the base of 2. So many words more than the mean
# has keep rows aligned.
PAD = tl.constexpr(4)
# Words of partial results that a program loads at a time to combine them: 64 in a thread's registers.
COMBINED = tl.constexpr(16384)


@triton.jit
def _store_rows(rows, results, lse, GROUP: tl.constexpr, DIM: tl.constexpr):
    """The partial results of a pair's query heads."""
    heads, dims = tl.arange(0, results.shape[0]), tl.arange(0, results.shape[1])
    at = rows + heads * (DIM + PAD)
    tl.store(at[:, None] + dims[None, :], results, mask=(heads < GROUP)[:, None] & (dims < DIM)[None, :])
    tl.store(at + DIM, lse, mask=heads < GROUP)


@triton.jit
def _attend(
    rows, q, k, v, lengths, task, capacity, scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, GROUPS: tl.constexpr, SHARED: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The partial results of one chunk into ``rows[task]``, by online softmax.

    Of a sequence there are GROUPS groups of query heads; SHARED of them, side by side, use one head of keys and values.
    A chunk without positions has zeros, and a log-sum-exp of -inf: it weighs nothing.
    """
    # A matrix product has at least 16 rows.
    HEADS: tl.constexpr = max(16, triton.next_power_of_2(GROUP))
    COLUMNS: tl.constexpr = max(16, triton.next_power_of_2(DIM))
    heads, dims = tl.arange(0, HEADS), tl.arange(0, COLUMNS)
    inside = (dims < DIM)[None, :]
    pair, chunk = task.to(tl.int64) // CHUNKS, task % CHUNKS
    at_query = (pair * GROUP + heads)[:, None] * DIM + dims[None, :]
    query = tl.load(q + at_query, mask=(heads < GROUP)[:, None] & inside, other=0)
    # Whole blocks, but for the last chunk's.
    length = tl.load(lengths + pair // GROUPS)
    size = tl.cdiv(tl.cdiv(length, BLOCK), CHUNKS) * BLOCK
    end = tl.minimum((chunk + 1) * size, length)
    highest = tl.full((HEADS,), float("-inf"), dtype=tl.float32)
    weight = tl.zeros((HEADS,), dtype=tl.float32)
    total = tl.zeros((HEADS, COLUMNS), dtype=tl.float32)
    for begin in range(chunk * size, end, BLOCK):
        positions = begin + tl.arange(0, BLOCK)
        here = positions < end
        at = (pair // SHARED * capacity + positions)[:, None] * DIM + dims[None, :]
        keys = tl.load(k + at, mask=here[:, None] & inside, other=0)
        values = tl.load(v + at, mask=here[:, None] & inside, other=0)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(here[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        kept, weights = tl.exp2(highest - higher), tl.exp2(scores - higher[:, None])
        weight = weight * kept + tl.sum(weights, axis=1)
        total = tl.dot(weights.to(values.dtype), values, total * kept[:, None], input_precision="ieee")
        highest = higher
    mean = total / tl.where(weight > 0, weight, 1)[:, None]
    _store_rows(rows + task.to(tl.int64) * GROUP * (DIM + PAD), mean, highest + tl.log2(weight), GROUP=GROUP, DIM=DIM)


@triton.jit
def _combine(rows, stride, N: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr):
    """Of N partial results of one pair, ``stride`` words apart, the mean under all of their softmax, and its LSE."""
    HEADS: tl.constexpr = triton.next_power_of_2(GROUP)
    COLUMNS: tl.constexpr = triton.next_power_of_2(DIM)
    # Mostly all of them at once, which loads nothing twice and waits once.
    PARTS: tl.constexpr = min(triton.next_power_of_2(N), max(1, COMBINED // (HEADS * COLUMNS)))
    heads, dims = tl.arange(0, HEADS), tl.arange(0, COLUMNS)
    highest = tl.full((HEADS,), float("-inf"), dtype=tl.float32)
    weight = tl.zeros((HEADS,), dtype=tl.float32)
    total = tl.zeros((HEADS, COLUMNS), dtype=tl.float32)
    for first in range(0, N, PARTS):
        parts = first + tl.arange(0, PARTS)
        here = (parts < N)[:, None] & (heads < GROUP)[None, :]
        at = rows + parts[:, None] * stride + heads[None, :] * (DIM + PAD)
        lse = tl.load(at + DIM, mask=here, other=float("-inf"))
        inside = here[:, :, None] & (dims < DIM)[None, None, :]
        results = tl.load(at[:, :, None] + dims[None, None, :], mask=inside, other=0)
        higher = tl.maximum(highest, tl.max(lse, axis=0))
        # Of a sequence without any position all LSEs are -inf, and their differences would be no numbers.
        shift = tl.where(higher > float("-inf"), higher, 0)
        kept, weights = tl.exp2(highest - shift), tl.exp2(lse - shift[None, :])
        weight = weight * kept + tl.sum(weights, axis=0)
        total = total * kept[:, None] + tl.sum(results * weights[:, :, None], axis=0)
        highest = higher
    return total / tl.where(weight > 0, weight, 1)[:, None], highest + tl.log2(weight)


@triton.jit
def _combine_ranks(gathered, out, pair, pairs, W: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr):
    """The output of one pair from what all ranks have sent."""
    # 64 bits: many sequences have more than 2^31 words in all.
    pair, row = pair.to(tl.int64), tl.cast(GROUP * (DIM + PAD), tl.int64)
    result, _ = _combine(gathered + pair * row, pairs * row, N=W, GROUP=GROUP, DIM=DIM)
    heads, dims = tl.arange(0, result.shape[0]), tl.arange(0, result.shape[1])
    mask = (heads < GROUP)[:, None] & (dims < DIM)[None, :]
    at = (pair * GROUP + heads)[:, None] * DIM + dims[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=mask)


# A number of pairs may be 1, and is no constant then.
@triton.jit(do_not_specialize=["pairs"])
def flash_decode(
    context_tensor, epochs, ended, arrived, partial, gathered, q, k, v, lengths, out, pairs, capacity, scale,
    W: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, GROUPS: tl.constexpr, SHARED: tl.constexpr,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``partial``: rows of this rank, ``[pairs, CHUNKS, GROUP]``; ``gathered``: of all, ``[2, W, pairs, GROUP]``.

    Counts only rise. ``ended``: ``[pairs]``, the chunks of a pair that have ended on this rank, in all calls so far.
    ``arrived``: ``[2, pairs]``, how many ranks have sent the pair. Calls alternate between the halves of ``gathered``
    and ``arrived``. A half may be written again without asking: a rank sends in call e + 2 when it has heard from every
    other in call e + 1, and who has sent in e + 1 has ended call e, and read all that came in it. For the same reason
    a count is right although ranks may be a call apart: what e + 2 adds to it comes after all that e does.
    """
    ctx = DeviceContext.initialize(context_tensor, num_ranks=W)
    program, programs = tl.program_id(0), tl.num_programs(0)
    # The number of this call, from 1 on. Each program keeps its own, on the device, so that a graph may replay.
    epoch = tl.load(epochs + program) + 1
    half = epoch % 2
    # What is sent of a pair.
    ROW: tl.constexpr = GROUP * (DIM + PAD)
    words = tl.arange(0, triton.next_power_of_2(ROW))
    arrived += half * pairs
    gathered += half * W * pairs * GROUP * (DIM + PAD)
    for task in range(program, pairs * CHUNKS, programs):
        pair = task // CHUNKS
        work = ctx.tracing.record_event_start(TraceEvent.compute, pid_m=pair, pid_n=task)
        _attend(
            partial,
            q,
            k,
            v,
            lengths=lengths,
            task=task,
            capacity=capacity,
            scale=scale,
            GROUP=GROUP,
            DIM=DIM,
            GROUPS=GROUPS,
            SHARED=SHARED,
            CHUNKS=CHUNKS,
            BLOCK=BLOCK,
        )
        ctx.tracing.record_event_end(work)
        # Releases this chunk's rows to the program that ends the last one, and acquires the others' for it.
        if ctx.atomic_add(ended + pair, 1, ctx.cur_rank, scope="gpu") == epoch * CHUNKS - 1:
            first = partial + pair.to(tl.int64) * CHUNKS * GROUP * (DIM + PAD)
            results, lse = _combine(first, GROUP * (DIM + PAD), N=CHUNKS, GROUP=GROUP, DIM=DIM)
            mine = gathered + (ctx.cur_rank * pairs + pair).to(tl.int64) * GROUP * (DIM + PAD)
            for distance in range(1, W + 1):
                peer = (ctx.cur_rank + distance) % W
                sent = ctx.tracing.record_event_start(TraceEvent.put, peer, mine + words, pair, mask=words < ROW)
                _store_rows(ctx.translate(mine, peer), results, lse, GROUP=GROUP, DIM=DIM)
                ctx.tracing.record_event_end(sent)
            # After these stores one is added on every rank, this one too. In one operation: a release waits until all
            # before it has been performed, so that of several, one for each peer, each would wait for the last one.
            ranks = tl.arange(0, triton.next_power_of_2(W))
            ctx.atomic_add(arrived + pair + 0 * ranks, 1, tl.where(ranks < W, ranks, 0), mask=ranks < W)
    # All programs are resident, and none waits before it has ended its tasks: so what is awaited comes.
    for pair in range(program, pairs, programs):
        # Every second call counts here, and this is number (epoch + 1) // 2 of them.
        ctx.wait(arrived + pair, (epoch + 1) // 2 * W, cmp="ge")
        _combine_ranks(gathered, out, pair=pair, pairs=pairs, W=W, GROUP=GROUP, DIM=DIM)
    store_after_sync(epochs + program, epoch)


@triton.jit(do_not_specialize=["pairs"])
def flash_decode_share(
    context_tensor, epochs, ended, partial, share, q, k, v, lengths, pairs, capacity, scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, GROUPS: tl.constexpr, SHARED: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """What `flash_decode` sends, into this rank's ``share``: rows, ``[pairs, GROUP]``."""
    ctx = DeviceContext.initialize(context_tensor)
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = tl.load(epochs + program) + 1
    for task in range(program, pairs * CHUNKS, programs):
        pair = task // CHUNKS
        work = ctx.tracing.record_event_start(TraceEvent.compute, pid_m=pair, pid_n=task)
        _attend(
            partial,
            q,
            k,
            v,
            lengths=lengths,
            task=task,
            capacity=capacity,
            scale=scale,
            GROUP=GROUP,
            DIM=DIM,
            GROUPS=GROUPS,
            SHARED=SHARED,
            CHUNKS=CHUNKS,
            BLOCK=BLOCK,
        )
        ctx.tracing.record_event_end(work)
        if ctx.atomic_add(ended + pair, 1, ctx.cur_rank, scope="gpu") == epoch * CHUNKS - 1:
            first = partial + pair.to(tl.int64) * CHUNKS * GROUP * (DIM + PAD)
            results, lse = _combine(first, GROUP * (DIM + PAD), N=CHUNKS, GROUP=GROUP, DIM=DIM)
            _store_rows(share + pair.to(tl.int64) * GROUP * (DIM + PAD), results, lse, GROUP=GROUP, DIM=DIM)
    store_after_sync(epochs + program, epoch)


@triton.jit(do_not_specialize=["pairs"])
def combine_shares(gathered, out, pairs, W: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr):
    """The output from the shares of all ranks; a program for each pair."""
    _combine_ranks(gathered, out, pair=tl.program_id(0), pairs=pairs, W=W, GROUP=GROUP, DIM=DIM)
