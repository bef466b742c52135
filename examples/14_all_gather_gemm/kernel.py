"""The rows of A lie on the ranks, and every rank multiplies all of them: by pull, or by push.

Pull: a program reads the rows of its tile from their owner's memory while it multiplies them. Nothing is stored in
between, nobody waits, and no memory is needed. But every tile fetches its rows anew. Over the link, each rank: m K
elements in from every peer for each column of tiles, so ``cdiv(N, BLOCK_N)`` times as many as by push, in one step.

Push: the first programs of each rank send its rows to all peers, a slab of BLOCK_M rows after the other, and signal
each slab after its last element. The others multiply the slabs that are there: this rank's own ones, which need no
link, and then those of the peers, in the order in which they come. Over the link, each rank: m K elements to every
peer, in one step.

The counts of push:

* ``arrived[r, slab]`` on every rank: each program of rank r that sends adds 1 after its part of the slab. Who
  multiplies the slab waits until all have, in this call and in those before. Counts only rise, so nothing is reset.
* ``epochs[program]``: calls so far. Each program keeps it for itself, in memory, which is right in a CUDA graph too.

A peer's slab is written over in the next call. That begins with a barrier of all ranks, which a rank enters when its
call is over. Its call is not over before all slabs have come, since each is a part of some tile. A rank's own slabs are
read on this rank alone: they may change as soon as its call is over.
"""

import triton
import triton.language as tl

from iris import DeviceContext, TraceEvent
from iris.language.ordering import store_after_sync  # a store, after every warp's load of the same word
from iris.ops.gemm import product
from iris.ops.kernel_arguments import Matrix, Tiling


@triton.jit
def pull(
    context_tensor, a, b, c, m, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    W: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``c = [a of rank 0; a of rank 1; …] b``. ``a``: ``[m, K]``, symmetric. ``c``: ``[W * m, N]``, anywhere."""
    ctx = DeviceContext.initialize(context_tensor, num_ranks=W)
    slabs, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for tile in range(tl.program_id(0), W * slabs * tiles_n, tl.num_programs(0)):
        # This rank's rows, then those of its right neighbour, and so on: each rank reads from another one at a time.
        line = tile // tiles_n
        owner = (ctx.cur_rank + line // slabs) % W
        rows = line % slabs * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = tile % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
        work = ctx.tracing.record_event_start(TraceEvent.compute, pid_m=owner, pid_n=tile)
        left, right = Matrix(ctx.translate(a, owner), stride_am, stride_ak), Matrix(b, stride_bk, stride_bn)
        total = product(left, right, rows, columns, stop_m=m, N=N, K=K, TILING=Tiling(BLOCK_M, BLOCK_N, BLOCK_K))
        ctx.tracing.record_event_end(work)
        mask = (rows < m)[:, None] & (columns < N)[None, :]
        at = (owner * m + rows).to(tl.int64)[:, None] * stride_cm + columns.to(tl.int64)[None, :] * stride_cn
        tl.store(c + at, total.to(c.dtype.element_ty), mask=mask)


@triton.jit
def push(
    context_tensor, gathered, b, c, arrived, epochs, m, N, K, stride_bk, stride_bn, stride_cm, stride_cn,
    W: tl.constexpr, SENDERS: tl.constexpr, SEND_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The same. ``gathered``: ``[W, m, K]``, contiguous and symmetric, with this rank's rows in their place."""
    ctx = DeviceContext.initialize(context_tensor, num_ranks=W)
    rank, program = ctx.cur_rank, tl.program_id(0)
    epoch = tl.load(epochs + program) + 1
    slabs, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(N, BLOCK_N)
    size = tl.cast(m, tl.int64) * K
    if program < SENDERS:
        for slab in range(slabs):
            rows = slab * BLOCK_M + tl.arange(0, BLOCK_M)
            for begin in range(program * SEND_K, K, SENDERS * SEND_K):
                columns = begin + tl.arange(0, SEND_K)
                mask = (rows < m)[:, None] & (columns < K)[None, :]
                at = gathered + rank * size + rows.to(tl.int64)[:, None] * K + columns[None, :]
                data = tl.load(at, mask=mask)
                for distance in range(1, W):
                    ctx.store(at, data, (rank + distance) % W, mask=mask)
            for distance in range(1, W):
                ctx.signal(arrived + rank * slabs + slab, 1, (rank + distance) % W, op="add")
    else:
        peers: tl.constexpr = W - 1 if W > 1 else 1
        for tile in range(program - SENDERS, W * slabs * tiles_n, tl.num_programs(0) - SENDERS):
            line = tile // tiles_n
            owner, slab = rank, line
            if line >= slabs:
                # The first slab of every peer, then the second.
                owner = (rank + 1 + (line - slabs) % peers) % W
                slab = (line - slabs) // peers
                ctx.wait(arrived + owner * slabs + slab, epoch * SENDERS, cmp="reached")
            rows = slab * BLOCK_M + tl.arange(0, BLOCK_M)
            columns = tile % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
            work = ctx.tracing.record_event_start(TraceEvent.compute, pid_m=owner, pid_n=tile)
            left, right = Matrix(gathered + owner * size, K, 1), Matrix(b, stride_bk, stride_bn)
            total = product(left, right, rows, columns, stop_m=m, N=N, K=K, TILING=Tiling(BLOCK_M, BLOCK_N, BLOCK_K))
            ctx.tracing.record_event_end(work)
            mask = (rows < m)[:, None] & (columns < N)[None, :]
            at = (owner * m + rows).to(tl.int64)[:, None] * stride_cm + columns.to(tl.int64)[None, :] * stride_cn
            tl.store(c + at, total.to(c.dtype.element_ty), mask=mask)
    store_after_sync(epochs + program, epoch)
