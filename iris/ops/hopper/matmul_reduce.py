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

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris.language.context import IrisDeviceCtx, aggregate
from iris.language.ordering import gluon_ordering
from iris.ops.counts import ARRIVED, gluon_counts
from iris.ops.gemm import gluon_place
from iris.ops.hopper.landing import add_parts, make_landing
from iris.ops.hopper.pace import at_once
from iris.ops.hopper.pipeline import REGISTERS, WARPS, load_tile, make_pipeline, multiply
from iris.ops.hopper.split_k import whole_tiles
from iris.ops.hopper.writer import await_products, free_products, send_products, send_products_to_all

await_bulk_stores, follow_predecessor, order_bulk_copies = (
    gluon_ordering.await_bulk_stores, gluon_ordering.follow_predecessor, gluon_ordering.order_bulk_copies,
)  # fmt: skip
await_done, await_ready, begin, end = (
    gluon_counts.await_done, gluon_counts.await_ready, gluon_counts.begin, gluon_counts.end,
)  # fmt: skip


@aggregate
class Order:
    """The tiles of all ranks' rows, by number.

    Blocks of `size` tiles come in the order: peers' block 0; peers' block 1, own block 0; peers' block 2, own block 1;
    ...; own last block. Tiles of the peers come by turns, so that at all times some programs of each rank send to every
    other: where all sent to one they met, sooner or later, at the same receiver. The last of a block may be tiles that
    there are not; their number is too large.
    """

    rank: gl.tensor
    share: gl.tensor
    rows: gl.tensor
    columns: gl.tensor
    W: gl.constexpr
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    BLOCKS: gl.constexpr
    GROUP: gl.constexpr

    @triton.constexpr_function
    def __init__(self, rank, share, rows, columns, W, BLOCK_M, BLOCK_N, BLOCKS, GROUP):
        self.rank = rank
        self.share = share
        self.rows = rows
        self.columns = columns
        self.W = gl.constexpr(W)
        self.BLOCK_M = gl.constexpr(BLOCK_M)
        self.BLOCK_N = gl.constexpr(BLOCK_N)
        self.BLOCKS = gl.constexpr(BLOCKS)
        self.GROUP = gl.constexpr(GROUP)

    @gluon.jit
    def tiles(self):
        """Of one rank, along its rows and along the columns."""
        return gl.cdiv(self.share, self.BLOCK_M), gl.cdiv(self.columns, self.BLOCK_N)

    @gluon.jit
    def size(self):
        tiles_m, tiles_n = self.tiles()
        return gl.cdiv(tiles_m * tiles_n, self.BLOCKS)

    @gluon.jit
    def count(self):
        return self.W * self.BLOCKS * self.size()

    @gluon.jit
    def place(self, number):
        """Whose rows a tile is of, which of theirs it is, its first row among them, and its first column."""
        tiles_m, tiles_n = self.tiles()
        size = self.size()
        peers: gl.constexpr = self.W - 1
        last = (self.W * self.BLOCKS - 1) * size
        # As if an own block, which there is not, came behind the first of the peers.
        shifted = number + gl.where(number < peers * size, 0, size)
        turn, inside = shifted // (self.W * size), shifted % (self.W * size)
        own = (inside >= peers * size) | (number >= last)
        block = gl.where(number >= last, self.BLOCKS - 1, gl.where(own, turn - 1, turn))
        if peers == 0:
            owner, theirs = self.rank, inside
        else:
            owner, theirs = (self.rank + 1 + inside % peers) % self.W, inside // peers
        in_block = gl.where(number >= last, number - last, gl.where(own, inside - peers * size, theirs))
        tile = block * size + in_block
        pid_m, pid_n = gluon_place(gl.minimum(tile, tiles_m * tiles_n - 1), tiles_m, tiles_n, self.GROUP)
        return gl.where(own, self.rank, owner), tile, pid_m * self.BLOCK_M, pid_n * self.BLOCK_N

    @gluon.jit
    def at(self, number):
        """The first row and column of a tile, of A and of B."""
        owner, _, row, column = self.place(number)
        return owner * self.share + row, column


@gluon.jit
def load(pipeline, units, order, a, b, K, BY_COLUMNS_A: gl.constexpr, BY_COLUMNS_B: gl.constexpr):
    """The loader's part."""
    step = 0
    for number in range(gl.program_id(0), units.count(), gl.num_programs(0)):
        row, column = order.at(number)
        step = load_tile(pipeline, a, b, row, column, K, 0, 1, step, BY_COLUMNS_A, BY_COLUMNS_B)


@gluon.jit
def write(
    pipeline, units, order, landing, ctx, counts, parts, peers_parts, parts_places, bias, out, peers_out, out_places,
    stride_om, stride_on, SPREADS: gl.constexpr, BIASED: gl.constexpr,
):  # fmt: skip
    """The writer's part."""
    W: gl.constexpr = ctx.num_ranks
    rank, share, N = ctx.cur_rank, order.share, order.columns
    tiles_m, tiles_n = order.tiles()
    await_ready(ctx, counts, units.epoch)
    done, fetched = 0, 0
    for number in range(gl.program_id(0), units.count(), gl.num_programs(0)):
        owner, tile, row, column = order.place(number)
        rows = gl.minimum(share, order.rows - owner * share)
        await_products(pipeline, done)
        if tile >= tiles_m * tiles_n:
            free_products(pipeline)
        elif owner != rank:
            place = gl.load(parts_places + owner)
            send_products(pipeline, ctx.tracing, peers_parts, place, counts, owner, row, column, rows, N)
            free_products(pipeline)
            ctx.signal(counts + ARRIVED + tile, 1, owner, op="add")
        else:
            ctx.wait(counts + ARRIVED + tile, units.epoch * (W - 1), cmp="reached")
            order_bulk_copies()
            fetched = add_parts(pipeline, landing, parts, fetched, bias, out, rank, W, row, column, rows, N, stride_om,
                                stride_on, SPREADS, BIASED)  # fmt: skip
            if SPREADS:
                send_products_to_all(pipeline, at_once(), ctx, peers_out, out_places, counts, row, column, rows, N)
            free_products(pipeline)
        done += 1
    if SPREADS:
        # For the strips that stay on this rank: those to peers are there.
        await_bulk_stores()
        await_done(ctx, counts, units.epoch)


# A number of rows may be 1, and is no constant then.
@gluon.jit(do_not_specialize=["M", "share"])
def hopper_matmul_reduce(
    context_tensor,
    counts,
    tensor_map_parts,
    tensor_map_peers,
    parts_places,
    tensor_map_a,
    tensor_map_b,
    bias,
    scale_a,
    scale_b,
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
    LINES_A: gl.constexpr,
    LINES_B: gl.constexpr,
):
    """``share``: rows that a rank adds up, M over W.

    ``tensor_map_parts``: on this rank ``[W, share, N]``, rank r's products in parts[r]. ``tensor_map_peers``: this
    rank's part on every rank, at ``parts_places``, int32 ``[W]``. With ``SPREADS`` the result is ``tensor_map_out``:
    this rank's rows of it on every rank, at ``out_places``; else ``out``, ``[share, N]``. ``scale_a``, ``scale_b``:
    float32, one number, or with ``LINES_A`` ``[M]`` and with ``LINES_B`` ``[N]``; or None.
    """
    follow_predecessor()
    ctx = IrisDeviceCtx.initialize(context_tensor, num_ranks=W)
    epoch = begin(ctx, counts)
    landing = make_landing(tensor_map_parts)
    pipeline = make_pipeline(tensor_map_a, tensor_map_b, tensor_map_parts.dtype, BLOCK_M, BLOCK_N, STAGES)
    order = Order(ctx.cur_rank, share, M, N, W, BLOCK_M, BLOCK_N, BLOCKS, GROUP)
    units = whole_tiles(order.count(), counts, epoch)
    gl.warp_specialize(
        [
            (multiply, (pipeline, ctx, units, order, scale_a, scale_b, K, 0, LINES_A, LINES_B, BY_COLUMNS_A,
                        BY_COLUMNS_B)),
            (multiply, (pipeline, ctx, units, order, scale_a, scale_b, K, 1, LINES_A, LINES_B, BY_COLUMNS_A,
                        BY_COLUMNS_B)),
            (write, (pipeline, units, order, landing, ctx, counts, tensor_map_parts, tensor_map_peers, parts_places,
                     bias, out, tensor_map_out, out_places, stride_om, stride_on, SPREADS, BIASED)),
            (load, (pipeline, units, order, tensor_map_a, tensor_map_b, K, BY_COLUMNS_A, BY_COLUMNS_B)),
        ],
        WARPS,
        REGISTERS,
    )  # fmt: skip
    end(counts, epoch)
