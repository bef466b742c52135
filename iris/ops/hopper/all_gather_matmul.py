"""out = the rows of all ranks' A, times B: the sender passes A on, and the loader waits for what it fetches.

A rank's rows are cut in chunks, and a chunk in parts along K. The senders of a rank, one warp each, pass its rows to
all peers: the first chunk part by part, then the next chunk. Meanwhile the multipliers are at the rank's own rows,
which nobody has to send; then at the first chunk of every peer, the second, and so on, as they arrive. Because parts
are cut along K, a tile is multiplied while it comes, and is done soon after the last of it is there.

Over the link, each rank: its ``[m, K]`` of A to every peer, W - 1 times m K elements out, in one step. Shared memory
to peer by TMA: no multiprocessor is taken from the product, and one warp keeps as much under way as the link takes.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from iris.language.context import IrisDeviceCtx
from iris.language.ordering import gluon_ordering
from iris.ops.counts import ARRIVED, gluon_counts
from iris.ops.gemm import gluon_place
from iris.ops.hopper.pipeline import (
    PANEL,
    REGISTERS_AND_SENDER,
    SENT,
    WARPS_AND_SENDER,
    await_products,
    barriers,
    fetch,
    free_products,
    load_tile,
    make_pipeline,
    multiply,
    put,
    store_products,
)

await_bulk_stores, order_bulk_copies = gluon_ordering.await_bulk_stores, gluon_ordering.order_bulk_copies
await_ready, begin, end, follow_predecessor, tell_arrived = (
    gluon_counts.await_ready, gluon_counts.begin, gluon_counts.end, gluon_counts.follow_predecessor,
    gluon_counts.tell_arrived,
)  # fmt: skip

# Boxes of A, of half a tile's rows and BLOCK_K, that a sender passes on at a time: 16 KiB of shared memory.
BOXES = gl.constexpr(2)


@gluon.jit
def tile_of(number, rank, W: gl.constexpr, tiles_m, tiles_n, chunks, GROUP: gl.constexpr):
    """Whose rows the tile is of, in which chunk of them, and its row and column there."""
    chunk = number // (tiles_m * tiles_n)
    pid_m, pid_n = gluon_place(number % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP)
    peers: gl.constexpr = W - 1 if W > 1 else 1
    theirs = chunk - chunks
    mine = theirs < 0
    owner = gl.where(mine, rank, (rank + 1 + theirs % peers) % W)
    return owner, gl.where(mine, chunk, theirs // peers), pid_m, pid_n


@gluon.jit
def pieces_of_a_part(a, chunk, PART_K: gl.constexpr):
    """How many pieces of `BOXES` boxes each part is sent in."""
    return chunk // a.block_type.shape[0] * (PART_K // (BOXES * a.block_type.shape[1]))


@gluon.jit
def send(pieces, loaded, ctx, counts, epoch, a, peers, places, m, chunk, K, PART_K: gl.constexpr):
    """The sender's part: this program's pieces, from A to shared memory and from there to every peer."""
    ROWS: gl.constexpr = a.block_type.shape[0]
    COLUMNS: gl.constexpr = a.block_type.shape[1]
    W: gl.constexpr = ctx.num_ranks
    across: gl.constexpr = PART_K // (BOXES * COLUMNS)
    parts_k, in_part = gl.cdiv(K, PART_K), pieces_of_a_part(a, chunk, PART_K)
    await_ready(ctx, counts, epoch)
    done = 0
    for number in range(gl.program_id(0), gl.cdiv(m, chunk) * parts_k * in_part, gl.num_programs(0)):
        part, inside = number // in_part, number % in_part
        row = part // parts_k * chunk + inside // across * ROWS
        k = part % parts_k * PART_K + inside % across * (BOXES * COLUMNS)
        mbarrier.expect(loaded, BOXES * a.block_type.nbytes)
        for box in gl.static_range(BOXES):
            fetch(a, [row, k + box * COLUMNS], loaded, pieces.index(box).reshape([ROWS, COLUMNS]))
        mbarrier.wait(loaded, done & 1)
        for turn in gl.static_range(W - 1):
            # Programs begin with different peers, so that all links are busy.
            place = gl.load(places + (ctx.cur_rank + 1 + (number + turn) % (W - 1)) % W)
            for box in gl.static_range(BOXES):
                for line in gl.static_range(ROWS // SENT):
                    memory = pieces.index(box).slice(line * SENT, SENT, 1)
                    put(peers, [place, row + line * SENT, k + box * COLUMNS], memory)
                    await_bulk_stores(0)
        tell_arrived(ctx, counts, ctx.cur_rank * gl.cdiv(m, chunk) * parts_k + part)
        done += 1


@gluon.jit
def load(
    pipeline, ctx, counts, epoch, a, gathered, b, m, chunk, N, K, PART_K: gl.constexpr, GROUP: gl.constexpr,
    BY_COLUMNS_B: gl.constexpr,
):  # fmt: skip
    """The loader's part."""
    BLOCK_M: gl.constexpr = 2 * pipeline.products.shape[2]
    BLOCK_N: gl.constexpr = pipeline.products.shape[0] // 2 * PANEL
    W: gl.constexpr = ctx.num_ranks
    tiles_m, tiles_n, chunks = chunk // BLOCK_M, gl.cdiv(N, BLOCK_N), gl.cdiv(m, chunk)
    parts_k, in_part = gl.cdiv(K, PART_K), pieces_of_a_part(a, chunk, PART_K)
    step = 0
    for number in range(gl.program_id(0), W * chunks * tiles_m * tiles_n, gl.num_programs(0)):
        owner, nth, pid_m, pid_n = tile_of(number, ctx.cur_rank, W, tiles_m, tiles_n, chunks, GROUP)
        row, column = nth * chunk + pid_m * BLOCK_M, pid_n * BLOCK_N
        if owner == ctx.cur_rank:
            step = load_tile(pipeline, a, b, row, column, 0, K, step, False, BY_COLUMNS_B)
        else:
            for k in range(0, K, PART_K):
                part = (owner * chunks + nth) * parts_k + k // PART_K
                ctx.wait(counts + ARRIVED + part, epoch * in_part, cmp="reached")
                order_bulk_copies()
                stop = gl.minimum(k + PART_K, K)
                step = load_tile(
                    pipeline, gathered, b, owner * m + row, column, k, stop, step, False, BY_COLUMNS_B
                )


@gluon.jit
def write(
    pipeline, rank, W: gl.constexpr, bias, out, m, chunk, N, stride_om, stride_on, GROUP: gl.constexpr,
    BIASED: gl.constexpr,
):  # fmt: skip
    """The writer's part: nothing goes over the link."""
    BLOCK_M: gl.constexpr = 2 * pipeline.products.shape[2]
    BLOCK_N: gl.constexpr = pipeline.products.shape[0] // 2 * PANEL
    tiles_m, tiles_n, chunks = chunk // BLOCK_M, gl.cdiv(N, BLOCK_N), gl.cdiv(m, chunk)
    done = 0
    for number in range(gl.program_id(0), W * chunks * tiles_m * tiles_n, gl.num_programs(0)):
        owner, nth, pid_m, pid_n = tile_of(number, rank, W, tiles_m, tiles_n, chunks, GROUP)
        row = owner * m + nth * chunk + pid_m * BLOCK_M
        await_products(pipeline, done)
        store_products(
            pipeline, bias, out, row, pid_n * BLOCK_N, (owner + 1) * m, N, stride_om, stride_on, BIASED
        )
        free_products(pipeline)
        done += 1


@gluon.jit
def hopper_all_gather_matmul(
    context_tensor,
    counts,
    tensor_map_a,
    tensor_map_gathered,
    tensor_map_peers,
    places,
    tensor_map_b,
    bias,
    out,
    m,
    chunk,
    N,
    K,
    stride_om,
    stride_on,
    W: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    PART_K: gl.constexpr,
    GROUP: gl.constexpr,
    BY_COLUMNS_B: gl.constexpr,
    BIASED: gl.constexpr,
):
    """A is this rank's ``[m, K]``, gathered ``[W * m, K]``, both by rows; ``out``: ``[W * m, N]``, anywhere.

    ``tensor_map_peers``: where this rank's rows go on every rank, at ``places``, int32 ``[W]``. ``chunk``: rows that
    are sent together, a multiple of ``BLOCK_M``, and ``PART_K`` of their columns, a multiple of 2 ``BLOCK_K``.
    """
    follow_predecessor()
    ctx = IrisDeviceCtx.initialize(context_tensor, num_ranks=W)
    epoch = begin(ctx, counts)
    pieces = gl.allocate_shared_memory(
        tensor_map_a.dtype, [BOXES, 1, tensor_map_a.block_type.shape[0], tensor_map_a.block_type.shape[1]],
        tensor_map_peers.layout,
    )  # fmt: skip
    loaded = barriers(1, 1).index(0)
    pipeline = make_pipeline(tensor_map_a, tensor_map_b, out.dtype.element_ty, BLOCK_M, BLOCK_N, STAGES)
    in_all = W * gl.cdiv(m, chunk) * (chunk // BLOCK_M) * gl.cdiv(N, BLOCK_N)
    tiles = gl.cdiv(in_all - gl.program_id(0), gl.num_programs(0))
    gl.warp_specialize(
        [
            (multiply, (pipeline, tiles, K, 0, False, BY_COLUMNS_B)),
            (multiply, (pipeline, tiles, K, 1, False, BY_COLUMNS_B)),
            (write, (pipeline, ctx.cur_rank, W, bias, out, m, chunk, N, stride_om, stride_on, GROUP, BIASED)),
            (load, (pipeline, ctx, counts, epoch, tensor_map_a, tensor_map_gathered, tensor_map_b, m, chunk, N, K,
                    PART_K, GROUP, BY_COLUMNS_B)),
            (send, (pieces, loaded, ctx, counts, epoch, tensor_map_a, tensor_map_peers, places, m, chunk, K, PART_K)),
        ],
        WARPS_AND_SENDER,
        REGISTERS_AND_SENDER,
    )  # fmt: skip
    end(counts, epoch)
