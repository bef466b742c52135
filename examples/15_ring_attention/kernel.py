"""Attention over a sequence that the ranks share: keys and values travel around the ring while they are used.

A sequence is cut in 2 W chunks, and rank r has chunks r and 2 W - 1 - r of the queries, keys and values (zigzag): with
a causal mask all ranks then have the same work. What a rank has of the keys and values of one head is a block, and a
chunk of it a part. In step i a rank works with the block of rank r - i: in step 0 with its own, later with what its
left neighbour has sent.

One kernel. Its first programs send: part by part and head by head, this rank's own block and then each that arrives,
to the right neighbour. The others attend: a task is a tile of the queries of one head, whose softmax stays in registers
over all steps, and a program that has ended one takes the next. Who has sent everything attends too.

A slot of the buffers holds the W - 1 blocks that a head receives; heads take the slots by turns, and a sender may fill
one again when its right neighbour has said that it is done with the head before. With twice as many slots as there are
heads in work at a time, one half is filled while the other is used.

Over the link, each rank: W - 1 times keys and values of a rank, 4 * heads * length * dim elements (``length``: of a
chunk), in W - 1 steps, all to its right neighbour; and of counts, one a part and sender to the right, one a task and
sender to the left.

``attention`` is the same without the sending, for collectives before it.
"""

import triton
import triton.language as tl

from iris import DeviceContext, TraceEvent
from iris.language.ordering import store_after_sync  # a store, after every warp's load of the same word


@triton.jit
def _attend(
    total, highest, weight, query, k, v, begin, end, limits, length, scale,
    DIM: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys ``begin`` to ``end`` of a part; if MASKED, each query's own end there."""
    dims = tl.arange(0, query.shape[1])
    inside = (dims < DIM)[None, :]
    for first in range(begin, end, BLOCK_N):
        positions = first + tl.arange(0, BLOCK_N)
        at = positions[:, None] * DIM + dims[None, :]
        here = inside
        if MASKED:
            here = inside & (positions < length)[:, None]
        keys = tl.load(k + at, mask=here, other=0)
        values = tl.load(v + at, mask=here, other=0)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
        if MASKED:
            scores = tl.where(positions[None, :] < limits[:, None], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1) * scale)
        kept, weights = tl.exp2(highest - higher), tl.exp2(scores * scale - higher[:, None])
        weight = weight * kept + tl.sum(weights, axis=1)
        total = tl.dot(weights.to(values.dtype), values, total * kept[:, None], input_precision="ieee")
        highest = higher
    return total, highest, weight


@triton.jit
def _attend_part(
    total, highest, weight, query, k, v, chunk, first_row, key_chunk, length, scale,
    DIM: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A tile of the queries of ``chunk``, and the ``length`` keys of ``key_chunk``, whose part begins at k and v."""
    rows = first_row + tl.arange(0, BLOCK_M)
    # Tiles of keys that all queries see whole; where the keys end; and where they end for each query.
    whole, end, limits = length // BLOCK_N * BLOCK_N, length + 0, length + 0 * rows
    if CAUSAL:
        own, later = key_chunk == chunk, key_chunk > chunk
        whole = tl.where(own, first_row // BLOCK_N * BLOCK_N, tl.where(later, 0, whole))
        end = tl.where(own, tl.minimum(first_row + BLOCK_M, length), tl.where(later, 0, end))
        limits = tl.where(own, tl.minimum(rows + 1, length), limits)
    total, highest, weight = _attend(
        total,
        highest,
        weight,
        query=query,
        k=k,
        v=v,
        begin=0,
        end=whole,
        limits=limits,
        length=length,
        scale=scale,
        DIM=DIM,
        BLOCK_N=BLOCK_N,
        MASKED=False,
    )
    return _attend(
        total,
        highest,
        weight,
        query=query,
        k=k,
        v=v,
        begin=whole,
        end=end,
        limits=limits,
        length=length,
        scale=scale,
        DIM=DIM,
        BLOCK_N=BLOCK_N,
        MASKED=True,
    )


@triton.jit
def _tile(task, length, BLOCK_M: tl.constexpr):
    """Head, part and first query of a task; of a head the last queries come first, as with a mask they have most."""
    tiles = tl.cdiv(length, BLOCK_M)
    place = 2 * tiles - 1 - task % (2 * tiles)
    return task // (2 * tiles), place // tiles, place % tiles * BLOCK_M


@triton.jit
def _rows(head, part, first_row, length, DIM: tl.constexpr, BLOCK_M: tl.constexpr):
    """Where a tile of queries is in ``[heads, 2, length, DIM]``, and which of it there is."""
    rows, dims = first_row + tl.arange(0, BLOCK_M), tl.arange(0, max(16, triton.next_power_of_2(DIM)))
    at = ((head.to(tl.int64) * 2 + part) * length + rows)[:, None] * DIM + dims[None, :]
    return at, (rows < length)[:, None] & (dims < DIM)[None, :]


@triton.jit
def _chunk(rank, part, W: tl.constexpr):
    """The chunk of the sequence that is this part of a rank's block."""
    return tl.where(part == 0, rank, 2 * W - 1 - rank)


@triton.jit
def _send(
    ctx, from_k, from_v, to, length, right, SENDERS: tl.constexpr, DIM: tl.constexpr, SEND_M: tl.constexpr
):  # fmt: skip
    """This program's rows of a part, the keys and the values of it, to the right neighbour."""
    rows, dims = tl.arange(0, SEND_M), tl.arange(0, triton.next_power_of_2(DIM))
    to_k = ctx.translate(to, right)
    to_v = to_k + 2 * tl.cast(length, tl.int64) * DIM
    for first in range(tl.program_id(0) * SEND_M, length, SENDERS * SEND_M):
        here = (first + rows < length)[:, None] & (dims < DIM)[None, :]
        at = (first + rows)[:, None] * DIM + dims[None, :]
        keys, values = tl.load(from_k + at, mask=here), tl.load(from_v + at, mask=here)
        sent = ctx.tracing.record_event_start(TraceEvent.put, right, to + at, mask=here)
        tl.store(to_k + at, keys, mask=here)
        ctx.tracing.record_event_end(sent)
        sent = ctx.tracing.record_event_start(
            TraceEvent.put, right, to + 2 * tl.cast(length, tl.int64) * DIM + at, mask=here
        )
        tl.store(to_v + at, values, mask=here)
        ctx.tracing.record_event_end(sent)


@triton.jit
def ring_attention(
    context_tensor, epochs, tickets, arrived, freed, blocks, q, k, v, out, heads, length, scale,
    W: tl.constexpr, DIM: tl.constexpr, CAUSAL: tl.constexpr, SLOTS: tl.constexpr, SENDERS: tl.constexpr,
    SEND_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """``q``, ``k``, ``v``, ``out``: ``[heads, 2, length, DIM]``. ``blocks``: ``[SLOTS, W - 1, 2, 2, length, DIM]``, by
    slot and step the keys and the values of a block.

    Counts only rise. Heads are numbered on from call to call: ``turn`` is how many have had the slot before.

    * ``arrived[slot, step, part]``: each sending program of the left neighbour adds 1 in each turn, after its stores.
    * ``freed[slot]``: in each turn each task of the right neighbour adds 1, and each of its sending programs if these
      pass blocks on, after its last load from the slot. A slot is free when all of its last turn have. All that count
      have waited for blocks of the same turn, and these are sent when all of the turn before are counted: so neither
      this count nor ``arrived`` ever mixes two turns. Nobody needs to know in which call a neighbour is.
    * ``tickets[0]``: the next task; each program draws one too many in each call. Tasks are drawn in the order of their
      heads, by programs that are all resident, and heads are sent in this order: the first head that is not done
      anywhere waits for nothing but itself.
    """
    ctx = DeviceContext.initialize(context_tensor, num_ranks=W)
    program, programs, rank = tl.program_id(0), tl.num_programs(0), ctx.cur_rank
    left, right = (rank + W - 1) % W, (rank + 1) % W
    # The number of this call, from 1 on. Each program keeps its own, on the device, so that a graph may replay.
    epoch = tl.load(epochs + program) + 1
    past = (epoch - 1) * heads
    of_head = 2 * tl.cdiv(length, BLOCK_M)
    tasks = heads * of_head
    # Of two ranks each sends its own block and passes nothing on.
    readers = of_head + (SENDERS if W > 2 else 0)
    part_size = tl.cast(length, tl.int64) * DIM
    block_size = 4 * part_size

    if program < SENDERS:
        for head in range(heads):
            slot, turn = (past + head) % SLOTS, (past + head) // SLOTS
            first = blocks + slot * (W - 1) * block_size
            counts = arrived + slot * W * 2
            ctx.wait(freed + slot, turn * readers, cmp="ge")
            if W > 1:
                for part in range(2):
                    own = (head.to(tl.int64) * 2 + part) * part_size
                    _send(
                        ctx,
                        k + own,
                        v + own,
                        first + part * part_size,
                        length=length,
                        right=right,
                        SENDERS=SENDERS,
                        DIM=DIM,
                        SEND_M=SEND_M,
                    )
                    ctx.signal(counts + 2 + part, 1, right, op="add")
            for step in range(1, W - 1):
                for part in range(2):
                    ctx.wait(counts + step * 2 + part, (turn + 1) * SENDERS, cmp="ge")
                    from_k = first + (step - 1) * block_size + part * part_size
                    from_v, to = from_k + 2 * part_size, from_k + block_size
                    _send(ctx, from_k, from_v, to, length=length, right=right, SENDERS=SENDERS, DIM=DIM, SEND_M=SEND_M)
                    ctx.signal(counts + step * 2 + 2 + part, 1, right, op="add")
            if W > 2:
                ctx.signal(freed + slot, 1, left, op="add")

    drawn = (epoch - 1) * (tasks + programs)
    task = (ctx.atomic_add(tickets, 1, rank, sem="relaxed", scope="gpu") - drawn).to(tl.int32)
    while task < tasks:
        head, query_part, first_row = _tile(task, length, BLOCK_M)
        slot, turn = (past + head) % SLOTS, (past + head) // SLOTS
        at, here = _rows(head, query_part, first_row, length, DIM=DIM, BLOCK_M=BLOCK_M)
        query = tl.load(q + at, mask=here, other=0)
        highest = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        weight = tl.zeros((BLOCK_M,), dtype=tl.float32)
        total = tl.zeros(query.shape, dtype=tl.float32)
        chunk = _chunk(rank, query_part, W)
        # Here every query sees a key at once, its own chunk's first or an earlier one: from then on no maximum is -inf,
        # and a tile of keys of which a query sees none has no weight in it.
        for part in range(2):
            own = (head.to(tl.int64) * 2 + part) * part_size
            work = ctx.tracing.record_event_start(TraceEvent.compute, pid_m=head, pid_n=first_row)
            total, highest, weight = _attend_part(
                total,
                highest,
                weight,
                query=query,
                k=k + own,
                v=v + own,
                chunk=chunk,
                first_row=first_row,
                key_chunk=_chunk(rank, part, W),
                length=length,
                scale=scale,
                DIM=DIM,
                CAUSAL=CAUSAL,
                BLOCK_M=BLOCK_M,
                BLOCK_N=BLOCK_N,
            )
            ctx.tracing.record_event_end(work)
        for step in range(1, W):
            block = blocks + (slot * (W - 1) + step - 1) * block_size
            for part in range(2):
                # Also for keys that the mask leaves out: the slot is not free before all of it has been written.
                ctx.wait(arrived + (slot * W + step) * 2 + part, (turn + 1) * SENDERS, cmp="ge")
                keys = block + part * part_size
                work = ctx.tracing.record_event_start(TraceEvent.compute, pid_m=head, pid_n=first_row)
                total, highest, weight = _attend_part(
                    total,
                    highest,
                    weight,
                    query=query,
                    k=keys,
                    v=keys + 2 * part_size,
                    chunk=chunk,
                    first_row=first_row,
                    key_chunk=_chunk((rank + W - step) % W, part, W),
                    length=length,
                    scale=scale,
                    DIM=DIM,
                    CAUSAL=CAUSAL,
                    BLOCK_M=BLOCK_M,
                    BLOCK_N=BLOCK_N,
                )
                ctx.tracing.record_event_end(work)
        tl.store(out + at, (total / weight[:, None]).to(out.dtype.element_ty), mask=here)
        if W > 1:
            ctx.signal(freed + slot, 1, left, op="add")
        task = (ctx.atomic_add(tickets, 1, rank, sem="relaxed", scope="gpu") - drawn).to(tl.int32)
    store_after_sync(epochs + program, epoch)


@triton.jit
def attention(
    q, k, v, out, totals, highests, weights, rank, first_step, steps, stride_owner, length, scale,
    W: tl.constexpr, DIM: tl.constexpr, CAUSAL: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Some of the steps, from and to ``totals``, ``highests`` and ``weights`` but for the FIRST and the LAST.

    ``k``, ``v``: ``[heads, 2, length, DIM]`` of each owner of a block, ``stride_owner`` elements apart. A program for
    each tile of queries.
    """
    head, query_part, first_row = _tile(tl.program_id(0), length, BLOCK_M)
    at, here = _rows(head, query_part, first_row, length, DIM=DIM, BLOCK_M=BLOCK_M)
    rows = first_row + tl.arange(0, BLOCK_M)
    of_row = (head * 2 + query_part) * length + rows
    query = tl.load(q + at, mask=here, other=0)
    if FIRST:
        highest = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        weight = tl.zeros((BLOCK_M,), dtype=tl.float32)
        total = tl.zeros(query.shape, dtype=tl.float32)
    else:
        highest = tl.load(highests + of_row, mask=rows < length, other=0)
        weight = tl.load(weights + of_row, mask=rows < length, other=1)
        total = tl.load(totals + at, mask=here, other=0)
    part_size = tl.cast(length, tl.int64) * DIM
    for step in range(first_step, first_step + steps):
        owner = (rank + W - step) % W
        block = tl.cast(owner, tl.int64) * stride_owner + head * 2 * part_size
        for part in range(2):
            total, highest, weight = _attend_part(
                total,
                highest,
                weight,
                query=query,
                k=k + block + part * part_size,
                v=v + block + part * part_size,
                chunk=_chunk(rank, query_part, W),
                first_row=first_row,
                key_chunk=_chunk(owner, part, W),
                length=length,
                scale=scale,
                DIM=DIM,
                CAUSAL=CAUSAL,
                BLOCK_M=BLOCK_M,
                BLOCK_N=BLOCK_N,
            )
    if LAST:
        tl.store(out + at, (total / weight[:, None]).to(out.dtype.element_ty), mask=here)
    else:
        tl.store(highests + of_row, highest, mask=rows < length)
        tl.store(weights + of_row, weight, mask=rows < length)
        tl.store(totals + at, total, mask=here)
