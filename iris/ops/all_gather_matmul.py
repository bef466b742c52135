"""out = the rows of all ranks' A, times B: a few programs send A, and the others multiply what is there.

Every rank begins with its own rows, which are there already. Meanwhile the first programs of each send its rows to all
peers, a slab of BLOCK_M rows after the other, in pieces of SEND_M x SEND_K elements. A tile waits until all pieces of
its rows have arrived, and tiles come in the order in which slabs do: the first slab of every peer, then the second.

Over the link, each rank: its ``[m, K]`` of A to every peer, W - 1 times m K elements out, in one step.
"""

import triton
import triton.language as tl

from iris.language.context import DeviceContext
from iris.language.tracing import TraceEvent
from iris.ops.counts import ARRIVED, triton_counts
from iris.ops.gemm import on_chiplets, product, scaled

await_ready, begin, end, follow_predecessor, tell_arrived = (
    triton_counts.await_ready, triton_counts.begin, triton_counts.end, triton_counts.follow_predecessor,
    triton_counts.tell_arrived,
)  # fmt: skip


# A number of rows may be 1, and is no constant then.
@triton.jit(do_not_specialize=["m"])
def all_gather_matmul(
    context_tensor,
    counts,
    gathered,
    a,
    b,
    bias,
    scale_a,
    scale_b,
    out,
    m,
    N,
    K,
    stride_am,
    stride_bk,
    stride_bn,
    stride_om,
    stride_on,
    W: tl.constexpr,
    SENDERS: tl.constexpr,
    SEND_M: tl.constexpr,
    SEND_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    XCDS: tl.constexpr,
    CHUNK: tl.constexpr,
    CACHE_A: tl.constexpr,
    CACHE_B: tl.constexpr,
    ALLOW_TF32: tl.constexpr,
    BIASED: tl.constexpr,
    SCALED: tl.constexpr,
):
    """``a``: this rank's ``[m, K]``, by rows. ``gathered``: ``[W, m, K]``, contiguous. ``out``: ``[W * m, N]``,
    anywhere.

    ``SENDERS``: programs that send; ``SEND_M`` divides ``BLOCK_M``. ``scale_a``: of all rows, ``[W * m]``.
    """
    follow_predecessor()
    ctx = DeviceContext.initialize(context_tensor, num_ranks=W)
    rank = ctx.cur_rank
    epoch = begin(ctx, counts)
    across = tl.cdiv(K, SEND_K)
    slabs, pieces = tl.cdiv(m, BLOCK_M), BLOCK_M // SEND_M * across
    step = m.to(tl.int64) * K
    if tl.program_id(0) < SENDERS:
        await_ready(ctx, counts, epoch)
        for piece in range(tl.program_id(0), slabs * pieces, SENDERS):
            slab = piece // pieces
            rows = slab * BLOCK_M + piece % pieces // across * SEND_M + tl.arange(0, SEND_M)
            columns = piece % across * SEND_K + tl.arange(0, SEND_K)
            mask = (rows < m)[:, None] & (columns < K)[None, :]
            data = tl.load(a + (rows.to(tl.int64)[:, None] * stride_am + columns[None, :]), mask=mask)
            to = gathered + rank * step + (rows.to(tl.int64)[:, None] * K + columns[None, :])
            for distance in range(1, W):
                ctx.store(to, data, (rank + distance) % W, mask=mask)
            tell_arrived(ctx, counts, rank * slabs + slab)
    else:
        programs = tl.num_programs(0) - SENDERS
        first = on_chiplets(tl.program_id(0) - SENDERS, programs, XCDS, CHUNK)
        tiles_n = tl.cdiv(N, BLOCK_N)
        for number in range(first, W * slabs * tiles_n, programs):
            # Own slabs, then those of the peers by turns.
            line, pid_n = number // tiles_n, number % tiles_n
            peers_line = line - slabs
            owner, slab = rank, line
            if peers_line >= 0:
                owner = (rank + 1 + peers_line % (W - 1 if W > 1 else 1)) % W
                slab = peers_line // (W - 1 if W > 1 else 1)
            local = slab * BLOCK_M + tl.arange(0, BLOCK_M)
            columns = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
            own = owner == rank
            if not own:
                ctx.wait(counts + ARRIVED + owner * slabs + slab, epoch * pieces, cmp="reached")
            # One loop for both, which has all of the shared memory for its stages.
            source, stride = tl.where(own, a, gathered + owner * step), tl.where(own, stride_am, K)
            work = ctx.tracing.record_event_start(TraceEvent.compute, pid_m=line, pid_n=pid_n)
            total = product(
                source, b, local, columns, m, N, K, stride, 1, stride_bk, stride_bn,
                BLOCK_K, CACHE_A, CACHE_B, ALLOW_TF32,
            )  # fmt: skip
            ctx.tracing.record_event_end(work)
            total = scaled(total, scale_a, scale_b, owner * m + local, columns, (owner + 1) * m, N, SCALED)
            if BIASED:
                total += tl.load(bias + columns, mask=columns < N, other=0)[None, :].to(tl.float32)
            mask = (local < m)[:, None] & (columns < N)[None, :]
            at = (owner * m + local).to(tl.int64)[:, None] * stride_om + columns.to(tl.int64)[None, :] * stride_on
            tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)
    end(counts, epoch)
