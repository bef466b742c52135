"""out = the sum of all ranks' A B: its rows shared among the ranks, or all of them on every rank.

The tiles of a rank's rows are cut in blocks. Each rank computes a block of every peer's tiles, by turns, and the writer
sends them to whom they belong; then the block of its own tiles that came before, to which the
writer adds what the peers have sent of it, in float32 and in the order of ranks. So what is sent has the time of a
block to arrive, and both the link and the sums are busy all the while. For all rows on every rank the writer then sends
the sums to all. The multipliers wait for nobody.

Over the link, each rank: (W - 1) / W times M N elements out, in one step; for all rows twice that, in two. Parts travel
in the type of the result, as they do through the vendor's library.

Nobody waits in a circle: what a tile's sum waits for comes earlier in the order, which is the same on all ranks.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris.language.context import IrisDeviceCtx
from iris.language.ordering import gluon_ordering
from iris.ops.counts import ARRIVED, gluon_counts
from iris.ops.gemm import gluon_place
from iris.ops.hopper.landing import add_parts, make_landing
from iris.ops.hopper.pace import at_once
from iris.ops.hopper.pipeline import (
    REGISTERS,
    WARPS,
    await_products,
    free_products,
    load_tile,
    make_pipeline,
    multiply,
    send_products,
    send_products_to_all,
)
from iris.ops.hopper.split_k import whole_tiles

await_bulk_stores, order_bulk_copies = gluon_ordering.await_bulk_stores, gluon_ordering.order_bulk_copies
await_done, await_ready, begin, end, follow_predecessor = (
    gluon_counts.await_done, gluon_counts.await_ready, gluon_counts.begin, gluon_counts.end,
    gluon_counts.follow_predecessor,
)  # fmt: skip


@gluon.jit
def tile_of(number, rank, W: gl.constexpr, tiles_m, tiles_n, BLOCKS: gl.constexpr, GROUP: gl.constexpr):
    """Whose rows the tile is of, its number among theirs, and its row and column there.

    Blocks of ``size`` tiles come in the order: peers' block 0; peers' block 1, own block 0; peers' block 2, own block
    1; ...; own last block. Tiles of the peers come by turns, so that at all times some programs of each rank send to
    every other: where all sent to one they met, sooner or later, at the same receiver. The last of a block may be tiles
    that there are not; their number is too large.
    """
    tiles = tiles_m * tiles_n
    size = gl.cdiv(tiles, BLOCKS)
    peers: gl.constexpr = W - 1
    last = (W * BLOCKS - 1) * size
    # As if an own block, which there is not, came behind the first of the peers.
    shifted = number + gl.where(number < peers * size, 0, size)
    turn, inside = shifted // (W * size), shifted % (W * size)
    own = (inside >= peers * size) | (number >= last)
    block = gl.where(number >= last, BLOCKS - 1, gl.where(own, turn - 1, turn))
    if peers == 0:
        owner, theirs = rank, inside
    else:
        owner, theirs = (rank + 1 + inside % peers) % W, inside // peers
    in_block = gl.where(number >= last, number - last, gl.where(own, inside - peers * size, theirs))
    tile = block * size + in_block
    pid_m, pid_n = gluon_place(gl.minimum(tile, tiles - 1), tiles_m, tiles_n, GROUP)
    return gl.where(own, rank, owner), tile, pid_m, pid_n


@gluon.jit
def load(
    pipeline, units, a, b, rank, W: gl.constexpr, share, N, K, BLOCKS: gl.constexpr, GROUP: gl.constexpr,
    BY_COLUMNS_A: gl.constexpr, BY_COLUMNS_B: gl.constexpr,
):  # fmt: skip
    """The loader's part."""
    BLOCK_M: gl.constexpr = 2 * pipeline.products.shape[2]
    BLOCK_N: gl.constexpr = pipeline.products.shape[0] // 2 * pipeline.products.shape[3]
    tiles_m, tiles_n = gl.cdiv(share, BLOCK_M), gl.cdiv(N, BLOCK_N)
    step = 0
    for number in range(gl.program_id(0), units.count(), gl.num_programs(0)):
        owner, _, pid_m, pid_n = tile_of(number, rank, W, tiles_m, tiles_n, BLOCKS, GROUP)
        row, column = owner * share + pid_m * BLOCK_M, pid_n * BLOCK_N
        step = load_tile(pipeline, a, b, row, column, K, 0, 1, step, BY_COLUMNS_A, BY_COLUMNS_B)


@gluon.jit
def write(
    pipeline, units, landing, ctx, counts, parts, peers_parts, parts_places, bias, out, peers_out, out_places, M, N,
    share, stride_om, stride_on, BLOCKS: gl.constexpr, GROUP: gl.constexpr, SPREADS: gl.constexpr, BIASED: gl.constexpr,
):  # fmt: skip
    """The writer's part."""
    BLOCK_M: gl.constexpr = 2 * pipeline.products.shape[2]
    BLOCK_N: gl.constexpr = pipeline.products.shape[0] // 2 * pipeline.products.shape[3]
    W: gl.constexpr = ctx.num_ranks
    rank = ctx.cur_rank
    tiles_m, tiles_n = gl.cdiv(share, BLOCK_M), gl.cdiv(N, BLOCK_N)
    await_ready(ctx, counts, units.epoch)
    done, fetched = 0, 0
    for number in range(gl.program_id(0), units.count(), gl.num_programs(0)):
        owner, tile, pid_m, pid_n = tile_of(number, rank, W, tiles_m, tiles_n, BLOCKS, GROUP)
        row, column = pid_m * BLOCK_M, pid_n * BLOCK_N
        await_products(pipeline, done)
        if tile >= tiles_m * tiles_n:
            free_products(pipeline)
        elif owner != rank:
            place, rows = gl.load(parts_places + owner), gl.minimum(share, M - owner * share)
            send_products(pipeline, ctx.tracing, peers_parts, place, counts, owner, row, column, rows, N)
            free_products(pipeline)
            await_bulk_stores()
            ctx.signal(counts + ARRIVED + tile, 1, owner, op="add")
        else:
            ctx.wait(counts + ARRIVED + tile, units.epoch * (W - 1), cmp="reached")
            order_bulk_copies()
            rows = gl.minimum(share, M - rank * share)
            fetched = add_parts(pipeline, landing, parts, fetched, bias, out, rank, W, row, column, rows, N, stride_om,
                                stride_on, SPREADS, BIASED)  # fmt: skip
            if SPREADS:
                send_products_to_all(pipeline, at_once(), ctx, peers_out, out_places, counts, row, column, rows, N)
            free_products(pipeline)
        done += 1
    if SPREADS:
        await_bulk_stores()
        await_done(ctx, counts, units.epoch)


# A number of rows may be 1, and is no constant then.
@gluon.jit(do_not_specialize=["share"])
def hopper_matmul_reduce(
    context_tensor,
    counts,
    tensor_map_parts,
    tensor_map_peers,
    parts_places,
    tensor_map_a,
    tensor_map_b,
    bias,
    out,
    tensor_map_out,
    out_places,
    M,
    N,
    K,
    share,
    stride_om,
    stride_on,
    W: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCKS: gl.constexpr,
    GROUP: gl.constexpr,
    SPREADS: gl.constexpr,
    BY_COLUMNS_A: gl.constexpr,
    BY_COLUMNS_B: gl.constexpr,
    BIASED: gl.constexpr,
):
    """``share``: rows that a rank adds up, M over W.

    ``tensor_map_parts``: on this rank ``[W, share, N]``, rank r's products in parts[r]. ``tensor_map_peers``: this
    rank's part on every rank, at ``parts_places``, int32 ``[W]``. With ``SPREADS`` the result is ``tensor_map_out``:
    this rank's rows of it on every rank, at ``out_places``; else ``out``, ``[share, N]``.
    """
    follow_predecessor()
    ctx = IrisDeviceCtx.initialize(context_tensor, num_ranks=W)
    epoch = begin(ctx, counts)
    landing = make_landing(tensor_map_parts)
    pipeline = make_pipeline(tensor_map_a, tensor_map_b, tensor_map_parts.dtype, BLOCK_M, BLOCK_N, STAGES)
    tiles = W * BLOCKS * gl.cdiv(gl.cdiv(share, BLOCK_M) * gl.cdiv(N, BLOCK_N), BLOCKS)
    units = whole_tiles(tiles, counts, epoch)
    gl.warp_specialize(
        [
            (multiply, (pipeline, ctx, units, K, 0, BY_COLUMNS_A, BY_COLUMNS_B)),
            (multiply, (pipeline, ctx, units, K, 1, BY_COLUMNS_A, BY_COLUMNS_B)),
            (write, (pipeline, units, landing, ctx, counts, tensor_map_parts, tensor_map_peers, parts_places, bias, out,
                     tensor_map_out, out_places, M, N, share, stride_om, stride_on, BLOCKS, GROUP, SPREADS, BIASED)),
            (load, (pipeline, units, tensor_map_a, tensor_map_b, ctx.cur_rank, W, share, N, K, BLOCKS, GROUP,
                    BY_COLUMNS_A, BY_COLUMNS_B)),
        ],
        WARPS,
        REGISTERS,
    )  # fmt: skip
    end(counts, epoch)
