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
from iris.ops.gemm import biased, product, scaled, swizzle_tile
from iris.ops.kernel_arguments import Matrix


# A number of rows may be 1, and is no constant then.
@triton.jit(do_not_specialize=["m"])
def all_gather_matmul_k(
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
    """``a``: this rank's ``[m, K]``, by rows. ``gathered``: ``[W, m, K]``, contiguous. ``b``: ``[W * K, N]``. ``out``:
    ``[m, N]``, anywhere.

    ``SENDING``: a `Sending`, whose ROWS divide those of a tile. ``TILING``: a `Tiling`, of no more chiplets than there
    are programs.
    """
    gdc_wait()
    ctx, counts = DeviceContext.initialize(channel.context, num_ranks=W), channel.counts
    BLOCK_M: tl.constexpr = TILING.BLOCK_M
    BLOCK_N: tl.constexpr = TILING.BLOCK_N
    rank = ctx.cur_rank
    epoch = begin(ctx, counts)
    slabs, strips = tl.cdiv(m, BLOCK_M), BLOCK_M // SENDING.ROWS
    step, depth = m.to(tl.int64) * K, tl.cast(b.row_stride, tl.int64) * K
    tickets = counts + ARRIVED + W * slabs
    if tl.program_id(0) < SENDING.PROGRAMS:
        send(ctx, counts, tickets, epoch, a=a, gathered=gathered, m=m, K=K, slabs=slabs, strips=strips, SENDING=SENDING)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = slabs * tiles_n
    number = take_tile(tickets + 1, epoch, tiles, TILING)
    while number < tiles:
        slab, pid_n = swizzle_tile(number, slabs, tiles_n, TILING.GROUP)
        rows = slab * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for owner in range(W):
            own = owner == rank
            if not own:
                ctx.wait(counts + ARRIVED + owner * slabs + slab, epoch * strips, cmp="reached")
            # Triton 3.6 for AMD cannot compile a choice between pointers of which one is a sum.
            source, stride = tl.where(own, a.ptr, gathered), tl.where(own, a.row_stride, K)
            source += tl.where(own, 0, owner * step)
            work = ctx.tracing.record_event_start(TraceEvent.compute, pid_m=owner * slabs + slab, pid_n=pid_n)
            left, right = Matrix(source, stride, 1), Matrix(b.ptr + owner * depth, b.row_stride, b.column_stride)
            total = product(left, right, rows, columns, stop_m=m, N=N, K=K, TILING=TILING, total=total)
            ctx.tracing.record_event_end(work)
        total = scaled(total, epilogue, rows, columns, stop_m=m, N=N)
        total = biased(total, epilogue, columns, N)
        at = rows.to(tl.int64)[:, None] * out.row_stride + columns.to(tl.int64)[None, :] * out.column_stride
        tl.store(out.ptr + at, total.to(out.ptr.dtype.element_ty), mask=(rows < m)[:, None] & (columns < N)[None, :])
        number = take_tile(tickets + 1, epoch, tiles, TILING)
    end(counts, epoch)
