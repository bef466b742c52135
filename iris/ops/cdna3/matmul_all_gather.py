"""out = the rows of every rank's A B, on every rank: each tile goes to all ranks when it is computed.

Compiled for gfx942 and gfx950 and run in the simulator; never run on an AMD GPU.

Over the link, each rank: its ``[M, N]`` of the result to every peer, W - 1 times M N elements out, in one step. A tile
travels while the next one is multiplied.

Peers' memory is written by plain stores. The release after the last of them is in `await_done`: each wavefront waits
until its own stores are done, all meet, and one writes back what the L2 still has (`iris.language.fences`).
"""

from triton.experimental.gluon import language as gl

from iris.language.context import DeviceContext
from iris.language.jit import gluon_jit
from iris.language.tracing import TraceEvent
from iris.ops.cdna3.product import fetch_both, product
from iris.ops.cdna3.strips import STRIP, columns_of, everywhere, rows_from, strips
from iris.ops.counts import await_done, await_ready, begin, end
from iris.ops.gemm import remap_xcd, swizzle_tile
from iris.ops.kernel_arguments import TilePlace


@gluon_jit
def tile_of(number, tiles_m, tiles_n, TILING: gl.constexpr):
    """The first row and column of a tile. After the last one there is none: the last will do, which nobody uses."""
    pid_m, pid_n = swizzle_tile(gl.minimum(number, tiles_m * tiles_n - 1), tiles_m, tiles_n, TILING.GROUP)
    return pid_m * TILING.BLOCK_M, pid_n * TILING.BLOCK_N


@gluon_jit
def cdna3_matmul_all_gather(
    channel,
    out_context,
    a,
    b,
    bias,
    out,
    M,
    N,
    K,
    W: gl.constexpr,
    TILING: gl.constexpr,
):
    """``out``: ``[W * M, N]``, the same place on every rank, in the memory that ``out_context`` is of."""
    ctx, counts = DeviceContext.initialize(channel.context, num_ranks=W), channel.counts
    out_ctx = DeviceContext.initialize(out_context, num_ranks=W)
    BLOCK_M: gl.constexpr = TILING.BLOCK_M
    BLOCK_N: gl.constexpr = TILING.BLOCK_N
    epoch = begin(ctx, counts)
    programs = gl.num_programs(0)
    first = remap_xcd(gl.program_id(0), programs, TILING.XCDS, TILING.CHUNK)
    tiles_m, tiles_n = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N)
    row, column = tile_of(first, tiles_m, tiles_n, TILING)
    x, y = fetch_both(a, b, TilePlace(row, column, M), 0, N=N, K=K, TILING=TILING)
    mine = out.ptr + gl.cast(ctx.cur_rank, gl.int64) * M * out.row_stride
    for number in range(first, tiles_m * tiles_n, programs):
        row, column = tile_of(number, tiles_m, tiles_n, TILING)
        next_row, next_column = tile_of(number + programs, tiles_m, tiles_n, TILING)
        work = ctx.tracing.record_event_start(TraceEvent.compute, pid_m=row // BLOCK_M, pid_n=column // BLOCK_N)
        place, following = TilePlace(row, column, M), TilePlace(next_row, next_column, M)
        total, x, y = product(x, y, a, b, place=place, next_a=a.ptr, following=following, N=N, K=K, TILING=TILING)
        ctx.tracing.record_event_end(work)
        if bias is not None:
            columns = column + gl.arange(0, BLOCK_N, gl.SliceLayout(0, total.type.layout))
            total += gl.load(bias + columns, mask=columns < N, other=0).to(gl.float32)[None, :]
        if number == first:
            await_ready(ctx, counts, epoch)
        places = everywhere(out_ctx, mine)
        values = strips(total.to(out.ptr.dtype.element_ty))
        rows = rows_from(row, BLOCK_M)
        for strip in gl.static_range(BLOCK_N // STRIP):
            columns = columns_of(column, strip)
            at = rows.to(gl.int64)[:, None] * out.row_stride + columns.to(gl.int64)[None, :] * out.column_stride
            mask = (rows < M)[:, None] & (columns < N)[None, :]
            for rank in gl.static_range(W):
                event = out_ctx.tracing.begin_move("store", mine + at, rank, mask)
                gl.store(places[rank] + at, values[strip], mask=mask)
                out_ctx.tracing.record_event_end(event)
    await_done(ctx, counts, epoch)
    end(counts, epoch)
