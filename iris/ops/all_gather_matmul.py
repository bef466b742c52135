"""out = the rows of all ranks' A, times B: a few programs send A, while the others multiply what is there.

A *slab* is BLOCK_M rows of a rank's A, the rows of one row of tiles. It is sent in *strips* of ``SENDING.ROWS`` rows.

1. The first ``SENDING.PROGRAMS`` programs of the grid send this rank's strips to all peers. When no strips are left
   they go on with step 2.
2. All other programs compute tiles: first those of this rank's own slabs, which are there already, then those of the
   first slab of every peer, of the second, and so on. A tile waits until all strips of its slab have arrived.

Programs draw strips and tiles from counters in memory (`take`), so whoever is free does what is next.

There is no deadlock, however few programs run at a time. A GPU begins the first programs of the grid first, which are
the senders. Before one of them draws a tile, for which it may have to wait, all strips of its rank have been drawn: by
programs that run, and that wait for nothing but the beginning of this call on all ranks.

Over the link, each rank: its ``[m, K]`` of A to every peer, W - 1 times m K elements out, in one step.
"""

import triton
import triton.language as tl

from iris.language.context import DeviceContext
from iris.language.dependent_launch import gdc_wait
from iris.language.tracing import TraceEvent
from iris.ops.counts import ARRIVED, await_ready, begin, end, signal_arrived
from iris.ops.gemm import biased, product, remap_xcd, scaled, swizzle_tile
from iris.ops.kernel_arguments import Matrix


@triton.jit
def take(ticket, epoch, items, takers):
    """The index of the next item that nobody has drawn from this counter; ``items`` or more if none is left.

    Each of the ``takers`` draws until none is left. So in every call the counter rises by ``items + takers``, and it
    needs no reset. It orders nothing: the data of a tile have flags of their own.
    """
    return tl.atomic_add(ticket, 1, sem="relaxed", scope="gpu") - (epoch - 1) * (items + takers)


@triton.jit
def take_tile(tickets, epoch, tiles, TILING: tl.constexpr):
    """The next tile for this program's chiplet. Each chiplet has a counter of its own."""
    XCDS: tl.constexpr = TILING.XCDS
    chiplet = tl.program_id(0) % XCDS
    theirs, takers = tl.cdiv(tiles - chiplet, XCDS), tl.cdiv(tl.num_programs(0) - chiplet, XCDS)
    return remap_xcd(take(tickets + chiplet, epoch, theirs, takers) * XCDS + chiplet, tiles, XCDS, TILING.CHUNK)


@triton.jit
def send(ctx, counts, ticket, epoch, a, gathered, m, K, slabs, strips, SENDING: tl.constexpr):
    """What a sender does: store strips of this rank's ``[m, K]`` to its place in every peer's ``[W, m, K]``."""
    W: tl.constexpr = ctx.num_ranks
    await_ready(ctx, counts, epoch)
    rank, step = ctx.cur_rank, m.to(tl.int64) * K
    strip = take(ticket, epoch, slabs * strips, SENDING.PROGRAMS)
    while strip < slabs * strips:
        rows = strip * SENDING.ROWS + tl.arange(0, SENDING.ROWS)
        for first in range(0, K, SENDING.COLUMNS):
            columns = first + tl.arange(0, SENDING.COLUMNS)
            mask = (rows < m)[:, None] & (columns < K)[None, :]
            data = tl.load(a.ptr + (rows.to(tl.int64)[:, None] * a.row_stride + columns[None, :]), mask=mask)
            to = gathered + rank * step + (rows.to(tl.int64)[:, None] * K + columns[None, :])
            for distance in range(1, W):
                ctx.store(to, data, (rank + distance) % W, mask=mask)
        # Once a strip: a release waits until the stores before it are there.
        signal_arrived(ctx, counts, rank * slabs + strip // strips)
        strip = take(ticket, epoch, slabs * strips, SENDING.PROGRAMS)


# A number of rows may be 1, and is no constant then.
@triton.jit(do_not_specialize=["m"])
def all_gather_matmul(
    channel,
    gathered,
    a,
    b,
    epilogue,
    out,
    m,
    N,
    K,
    W: tl.constexpr,
    SENDING: tl.constexpr,
    TILING: tl.constexpr,
):
    """``a``: this rank's ``[m, K]``, by rows. ``gathered``: ``[W, m, K]``, contiguous. ``out``: ``[W * m, N]``,
    anywhere.

    ``SENDING``: a `Sending`, whose ROWS divide those of a tile. ``epilogue.scale_a``: of all rows, ``[W * m]``.
    ``TILING``: a `Tiling`, of no more chiplets than there are programs.
    """
    gdc_wait()
    ctx, counts = DeviceContext.initialize(channel.context, num_ranks=W), channel.counts
    BLOCK_M: tl.constexpr = TILING.BLOCK_M
    BLOCK_N: tl.constexpr = TILING.BLOCK_N
    rank = ctx.cur_rank
    epoch = begin(ctx, counts)
    slabs, strips = tl.cdiv(m, BLOCK_M), BLOCK_M // SENDING.ROWS
    step = m.to(tl.int64) * K
    tickets = counts + ARRIVED + W * slabs
    if tl.program_id(0) < SENDING.PROGRAMS:
        send(ctx, counts, tickets, epoch, a=a, gathered=gathered, m=m, K=K, slabs=slabs, strips=strips, SENDING=SENDING)
    tiles_n = tl.cdiv(N, BLOCK_N)
    peers: tl.constexpr = W - 1 if W > 1 else 1
    own_tiles, tiles = slabs * tiles_n, W * slabs * tiles_n
    number = take_tile(tickets + 1, epoch, tiles, TILING)
    while number < tiles:
        # Own slabs come first, so that rows of peers have that time to arrive; then slab 0 of every peer, then slab 1.
        own = number < own_tiles
        owner = rank
        if own:
            slab, pid_n = swizzle_tile(number, slabs, tiles_n, TILING.GROUP)
        else:
            line, pid_n = swizzle_tile(number - own_tiles, peers * slabs, tiles_n, TILING.GROUP)
            owner, slab = (rank + 1 + line % peers) % W, line // peers
        local = slab * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        if not own:
            ctx.wait(counts + ARRIVED + owner * slabs + slab, epoch * strips, cmp="reached")
        # One loop for both, which has all of the shared memory for its stages. Triton 3.6 for AMD cannot compile a
        # choice between pointers of which one is a sum.
        source, stride = tl.where(own, a.ptr, gathered), tl.where(own, a.row_stride, K)
        source += tl.where(own, 0, owner * step)
        work = ctx.tracing.record_event_start(TraceEvent.compute, pid_m=owner * slabs + slab, pid_n=pid_n)
        total = product(Matrix(source, stride, 1), b, local, columns, stop_m=m, N=N, K=K, TILING=TILING)
        ctx.tracing.record_event_end(work)
        total = scaled(total, epilogue, owner * m + local, columns, stop_m=(owner + 1) * m, N=N)
        total = biased(total, epilogue, columns, N)
        mask = (local < m)[:, None] & (columns < N)[None, :]
        at_m = (owner * m + local).to(tl.int64)[:, None] * out.row_stride
        at_n = columns.to(tl.int64)[None, :] * out.column_stride
        tl.store(out.ptr + (at_m + at_n), total.to(out.ptr.dtype.element_ty), mask=mask)
        number = take_tile(tickets + 1, epoch, tiles, TILING)
    end(counts, epoch)
