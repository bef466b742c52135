"""out = the columns of all ranks' A, side by side, times B: ``all_gather_matmul(gather_dim="k")``.

The first programs of each rank send its columns to all peers, a slab of BLOCK_M rows after the other, as in
`iris.ops.all_gather_matmul`, and multiply afterwards. A tile is a sum over the ranks: it waits until a rank's columns
of its rows have arrived, adds their product with the rows of B that belong to them, and goes on to the next rank's. The
sum is formed in float32 and rounded once, from rank 0 on everywhere, so ranks with equal B get the same bits.

Flags, and why nobody waits in a circle: as there. ``arrived`` has a count for each slab of each rank, which rises by
the strips of a slab in every call.

Over the link, each rank: its ``[m, K]`` of A to every peer, W - 1 times m K elements out, in one step.
"""

import triton
import triton.language as tl

from iris.language.context import DeviceContext
from iris.language.dependent_launch import gdc_wait
from iris.language.tracing import TraceEvent
from iris.ops.all_gather_matmul import send, take_tile
from iris.ops.counts import ARRIVED, begin, end
from iris.ops.gemm import product, scaled, swizzle_tile


# A number of rows may be 1, and is no constant then.
@triton.jit(do_not_specialize=["m"])
def all_gather_matmul_k(
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
    GROUP: tl.constexpr,
    XCDS: tl.constexpr,
    CHUNK: tl.constexpr,
    CACHE_A: tl.constexpr,
    CACHE_B: tl.constexpr,
    ALLOW_TF32: tl.constexpr,
    BIASED: tl.constexpr,
    SCALED: tl.constexpr,
):
    """``a``: this rank's ``[m, K]``, by rows. ``gathered``: ``[W, m, K]``, contiguous. ``b``: ``[W * K, N]``. ``out``:
    ``[m, N]``, anywhere.

    ``SENDERS``: programs that send first; ``SEND_M`` divides ``BLOCK_M``. ``XCDS``: no more than there are programs.
    """
    gdc_wait()
    ctx = DeviceContext.initialize(context_tensor, num_ranks=W)
    rank = ctx.cur_rank
    epoch = begin(ctx, counts)
    slabs, strips = tl.cdiv(m, BLOCK_M), BLOCK_M // SEND_M
    step, depth = m.to(tl.int64) * K, tl.cast(stride_bk, tl.int64) * K
    tickets = counts + ARRIVED + W * slabs
    if tl.program_id(0) < SENDERS:
        send(ctx, counts, tickets, epoch, a, gathered, m, K, stride_am, slabs, strips, W, SENDERS, SEND_M, SEND_K)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = slabs * tiles_n
    number = take_tile(tickets + 1, epoch, tiles, XCDS, CHUNK)
    while number < tiles:
        slab, pid_n = swizzle_tile(number, slabs, tiles_n, GROUP)
        rows = slab * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for owner in range(W):
            own = owner == rank
            if not own:
                ctx.wait(counts + ARRIVED + owner * slabs + slab, epoch * strips, cmp="reached")
            # Triton 3.6 for AMD cannot compile a choice between pointers of which one is a sum.
            source, stride = tl.where(own, a, gathered), tl.where(own, stride_am, K)
            source += tl.where(own, 0, owner * step)
            work = ctx.tracing.record_event_start(TraceEvent.compute, pid_m=owner * slabs + slab, pid_n=pid_n)
            total = product(
                source, b + owner * depth, rows, columns, m, N, K, stride, 1, stride_bk, stride_bn,
                BLOCK_K, CACHE_A, CACHE_B, ALLOW_TF32, total,
            )  # fmt: skip
            ctx.tracing.record_event_end(work)
        total = scaled(total, scale_a, scale_b, rows, columns, m, N, SCALED)
        if BIASED:
            total += tl.load(bias + columns, mask=columns < N, other=0)[None, :].to(tl.float32)
        at = rows.to(tl.int64)[:, None] * stride_om + columns.to(tl.int64)[None, :] * stride_on
        tl.store(out + at, total.to(out.dtype.element_ty), mask=(rows < m)[:, None] & (columns < N)[None, :])
        number = take_tile(tickets + 1, epoch, tiles, XCDS, CHUNK)
    end(counts, epoch)
