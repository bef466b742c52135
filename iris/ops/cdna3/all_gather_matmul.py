"""out = the rows of all ranks' A, times B: a few programs send A, and the others multiply what is there.

Compiled for gfx942 and gfx950 and run in the simulator; never run on an AMD GPU.

As the Triton kernel of that name (`iris.ops.all_gather_matmul`): every rank begins with its own rows, while its first
programs send them to all peers, a slab of BLOCK_M rows after the other, in pieces of one strip of columns each. Tiles
come in the order in which slabs do: the first slab of every peer, then the second.

Over the link, each rank: its ``[m, K]`` of A to every peer, W - 1 times m K elements out, in one step, in whole lines
of 128 bytes.

A program begins to load the next tile in the last step of a tile. So it waits for the rows of the next one before it
multiplies this one: for longer than it would have to, by one tile, and only while the link is behind. Nobody waits in a
circle: those who send wait for nobody but until all ranks have begun.
"""

from triton.experimental.gluon import language as gl

from iris.language.context import DeviceContext
from iris.language.jit import gluon_jit
from iris.language.tracing import TraceEvent
from iris.ops.cdna3.product import fetch_both, product
from iris.ops.cdna3.strips import STRIP, columns_of, everywhere, rows_from, strips
from iris.ops.counts import ARRIVED, await_ready, begin, end, signal_arrived
from iris.ops.gemm import remap_xcd
from iris.ops.kernel_arguments import Matrix, TilePlace


@gluon_jit
def tile_of(number, rank, W: gl.constexpr, slabs, tiles_n):
    """Whose rows the tile is of, in which slab, and its column of tiles. Own slabs first, then peers' by turns."""
    line, pid_n = number // tiles_n, number % tiles_n
    peers: gl.constexpr = W - 1 if W > 1 else 1
    of_peers = line - slabs
    owner = gl.where(of_peers < 0, rank, (rank + 1 + of_peers % peers) % W)
    return owner, gl.where(of_peers < 0, line, of_peers // peers), pid_n


@gluon_jit
def rows_of(ctx, counts, a, gathered, owner, slab, slabs, m, K, target):
    """The owner's rows, once those of this slab are there."""
    if owner != ctx.cur_rank:
        ctx.wait(counts + ARRIVED + owner * slabs + slab, target, cmp="reached")
    return gl.where(owner == ctx.cur_rank, a, gathered + gl.cast(owner, gl.int64) * m * K)


@gluon_jit
def send(ctx, counts, a, gathered, slabs, m, K, epoch, SENDERS: gl.constexpr, BLOCK_M: gl.constexpr):
    """The senders' part."""
    mine = gathered + gl.cast(ctx.cur_rank, gl.int64) * m * K
    pieces = gl.cdiv(K, STRIP)
    await_ready(ctx, counts, epoch)
    places = everywhere(ctx, mine)
    for piece in range(gl.program_id(0), slabs * pieces, SENDERS):
        slab = piece // pieces
        rows, columns = rows_from(slab * BLOCK_M, BLOCK_M), columns_of(piece % pieces * STRIP, 0)
        mask = (rows < m)[:, None] & (columns < K)[None, :]
        at = rows.to(gl.int64)[:, None] * K + columns[None, :]
        data = gl.load(a + at, mask=mask)
        # The last of the places is this rank's own, which has no need of it.
        for peer in gl.static_range(ctx.num_ranks - 1):
            event = ctx.tracing.begin_move("store", mine + at, (ctx.cur_rank + peer + 1) % ctx.num_ranks, mask)
            gl.store(places[peer] + at, data, mask=mask)
            ctx.tracing.record_event_end(event)
        signal_arrived(ctx, counts, ctx.cur_rank * slabs + slab)


# A number of rows may be 1, and is no constant then.
@gluon_jit(do_not_specialize=["m"])
def cdna3_all_gather_matmul(
    channel,
    gathered,
    a,
    b,
    bias,
    out,
    m,
    N,
    K,
    W: gl.constexpr,
    SENDERS: gl.constexpr,
    TILING: gl.constexpr,
):
    """``a``: this rank's ``[m, K]``, ``gathered``: ``[W, m, K]``, both contiguous. ``out``: ``[W * m, N]``, anywhere.

    ``SENDERS``: programs that send.
    """
    ctx, counts = DeviceContext.initialize(channel.context, num_ranks=W), channel.counts
    rank = ctx.cur_rank
    BLOCK_M: gl.constexpr = TILING.BLOCK_M
    BLOCK_N: gl.constexpr = TILING.BLOCK_N
    epoch = begin(ctx, counts)
    slabs = gl.cdiv(m, BLOCK_M)
    if gl.program_id(0) < SENDERS:
        send(ctx, counts, a, gathered, slabs=slabs, m=m, K=K, epoch=epoch, SENDERS=SENDERS, BLOCK_M=BLOCK_M)
    else:
        target = epoch * gl.cdiv(K, STRIP)
        programs = gl.num_programs(0) - SENDERS
        first = remap_xcd(gl.program_id(0) - SENDERS, programs, TILING.XCDS, TILING.CHUNK)
        tiles_n = gl.cdiv(N, BLOCK_N)
        tiles = W * slabs * tiles_n
        owner, slab, pid_n = tile_of(gl.minimum(first, tiles - 1), rank=rank, W=W, slabs=slabs, tiles_n=tiles_n)
        left = rows_of(ctx, counts, a, gathered, owner=owner, slab=slab, slabs=slabs, m=m, K=K, target=target)
        at = TilePlace(slab * BLOCK_M, pid_n * BLOCK_N, m)
        x, y = fetch_both(Matrix(left, K, 1), b, at, 0, N=N, K=K, TILING=TILING)
        for number in range(first, tiles, programs):
            # After the last tile there is none: this one will do, for which nothing is waited for any more.
            following = gl.where(number + programs < tiles, number + programs, number)
            next_owner, next_slab, next_n = tile_of(following, rank=rank, W=W, slabs=slabs, tiles_n=tiles_n)
            next_left = rows_of(
                ctx, counts, a, gathered, owner=next_owner, slab=next_slab, slabs=slabs, m=m, K=K, target=target
            )
            work = ctx.tracing.record_event_start(TraceEvent.compute, pid_m=number // tiles_n, pid_n=pid_n)
            place = TilePlace(slab * BLOCK_M, pid_n * BLOCK_N, m)
            next_place = TilePlace(next_slab * BLOCK_M, next_n * BLOCK_N, m)
            total, x, y = product(
                x,
                y,
                Matrix(left, K, 1),
                b,
                place=place,
                next_a=next_left,
                following=next_place,
                N=N,
                K=K,
                TILING=TILING,
            )
            ctx.tracing.record_event_end(work)
            if bias is not None:
                columns = pid_n * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, total.type.layout))
                total += gl.load(bias + columns, mask=columns < N, other=0).to(gl.float32)[None, :]
            values = strips(total.to(out.ptr.dtype.element_ty))
            rows = rows_from(slab * BLOCK_M, BLOCK_M)
            at_row = (owner * m + rows).to(gl.int64)[:, None] * out.row_stride
            for strip in gl.static_range(BLOCK_N // STRIP):
                columns = columns_of(pid_n * BLOCK_N, strip)
                mask = (rows < m)[:, None] & (columns < N)[None, :]
                gl.store(
                    out.ptr + (at_row + columns.to(gl.int64)[None, :] * out.column_stride), values[strip], mask=mask
                )
            left, owner, slab, pid_n = next_left, next_owner, next_slab, next_n
    end(counts, epoch)
