"""A product whose rows come, go or are added up by parts, while copy engines move them.

The rows of A are W parts of ``share`` rows, a rank's each, and every part is cut in chunks. The kernel multiplies the
parts in turn, from part ``first`` on, chunk by chunk. It moves nothing over the link; counts in ``counts``, of the
operation's own memory, connect it with the copies on another stream (`iris.ops.hopper.moves`):

* with ``AWAITS`` a tile waits until its chunk of A has arrived, unless it is of this rank's own part;
* with ``COUNTS`` the writer counts each tile that it has stored, so that the chunk can be sent when all have been;
* with ``ADDS`` the writer waits for the same chunk of every peer's product, and stores the sum of them, in float32 and in
  the order of ranks.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris.language.context import IrisDeviceCtx
from iris.language.ordering import gluon_ordering
from iris.ops.counts import ARRIVED
from iris.ops.gemm import gluon_place
from iris.ops.hopper.pipeline import (
    REGISTERS,
    PANEL,
    WARPS,
    await_products,
    free_products,
    load_tile,
    make_pipeline,
    multiply,
    store_products,
)

follow_predecessor, order_bulk_copies = gluon_ordering.follow_predecessor, gluon_ordering.order_bulk_copies


@gluon.jit
def tile_of(number, first, num_parts, tiles_m, tiles_n, chunks, GROUP: gl.constexpr):
    """Of which part the tile is, of which of its chunks, and its row and column in that."""
    chunk = number // (tiles_m * tiles_n)
    pid_m, pid_n = gluon_place(number % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP)
    return (first + chunk // chunks) % num_parts, chunk % chunks, pid_m, pid_n


@gluon.jit
def load(
    pipeline, ctx, counts, epoch, own, a, b, first, parts, num_parts, share, chunk, N, K, GROUP: gl.constexpr,
    AWAITS: gl.constexpr, BY_COLUMNS_A: gl.constexpr, BY_COLUMNS_B: gl.constexpr,
):  # fmt: skip
    """The loader's part."""
    BLOCK_M: gl.constexpr = 2 * pipeline.products.shape[2]
    BLOCK_N: gl.constexpr = pipeline.products.shape[0] // 2 * PANEL
    tiles_m, tiles_n, chunks = chunk // BLOCK_M, gl.cdiv(N, BLOCK_N), gl.cdiv(share, chunk)
    step = 0
    for number in range(gl.program_id(0), parts * chunks * tiles_m * tiles_n, gl.num_programs(0)):
        part, nth, pid_m, pid_n = tile_of(number, first, num_parts, tiles_m, tiles_n, chunks, GROUP)
        row, column = nth * chunk + pid_m * BLOCK_M, pid_n * BLOCK_N
        if AWAITS:
            if part == ctx.cur_rank:
                step = load_tile(pipeline, own, b, row, column, 0, K, step, False, BY_COLUMNS_B)
            else:
                ctx.wait(counts + ARRIVED + part * chunks + nth, epoch, cmp="reached")
                order_bulk_copies()
                step = load_tile(pipeline, a, b, part * share + row, column, 0, K, step, False, BY_COLUMNS_B)
        else:
            step = load_tile(pipeline, a, b, part * share + row, column, 0, K, step, BY_COLUMNS_A, BY_COLUMNS_B)


@gluon.jit
def write(
    pipeline, ctx, counts, epoch, peers_products, bias, out, first, parts, num_parts, share, rows, chunk, N, stride_om,
    stride_on, GROUP: gl.constexpr, COUNTS: gl.constexpr, ADDS: gl.constexpr, BIASED: gl.constexpr,
):  # fmt: skip
    """The writer's part."""
    BLOCK_M: gl.constexpr = 2 * pipeline.products.shape[2]
    BLOCK_N: gl.constexpr = pipeline.products.shape[0] // 2 * PANEL
    tiles_m, tiles_n, chunks = chunk // BLOCK_M, gl.cdiv(N, BLOCK_N), gl.cdiv(share, chunk)
    done = 0
    for number in range(gl.program_id(0), parts * chunks * tiles_m * tiles_n, gl.num_programs(0)):
        part, nth, pid_m, pid_n = tile_of(number, first, num_parts, tiles_m, tiles_n, chunks, GROUP)
        row, stop = part * share + nth * chunk + pid_m * BLOCK_M, gl.minimum((part + 1) * share, rows)
        await_products(pipeline, done)
        store_products(pipeline, bias, out, row, pid_n * BLOCK_N, stop, N, stride_om, stride_on, BIASED)
        free_products(pipeline)
        if COUNTS:
            # Behind the stores of both of the writer's warps. For a kernel on the same GPU, behind which the copy comes.
            ctx.atomic_add(counts + ARRIVED + (W + part) * chunks + nth, 1, rank, sem="release", scope="gpu")
        done += 1


@gluon.jit
def hopper_product(
    context_tensor,
    counts,
    tensor_map_own,
    tensor_map_a,
    tensor_map_b,
    peers_products,
    bias,
    out,
    first,
    parts,
    num_parts,
    share,
    rows,
    chunk,
    N,
    K,
    stride_om,
    stride_on,
    W: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    AWAITS: gl.constexpr,
    COUNTS: gl.constexpr,
    ADDS: gl.constexpr,
    BY_COLUMNS_A: gl.constexpr,
    BY_COLUMNS_B: gl.constexpr,
    BIASED: gl.constexpr,
):
    """``parts`` of ``num_parts`` parts, from ``first`` on; ``rows``: of all, the last part may have fewer than ``share``.

    A: ``[num_parts * share, K]``, or at least ``[rows, K]``; with ``AWAITS`` the rank's own part is ``tensor_map_own``.
    ``out``: row r of part p is its row ``p * share + r``, or with ``ADDS`` row r. ``peers_products``: ``[W, share, N]``.
    """
    follow_predecessor()
    ctx = IrisDeviceCtx.initialize(context_tensor, num_ranks=W)
    epoch = gl.load(counts)
    pipeline = make_pipeline(tensor_map_a, tensor_map_b, out.dtype.element_ty, BLOCK_M, BLOCK_N, STAGES)
    in_all = parts * gl.cdiv(share, chunk) * (chunk // BLOCK_M) * gl.cdiv(N, BLOCK_N)
    tiles = gl.cdiv(in_all - gl.program_id(0), gl.num_programs(0))
    gl.warp_specialize(
        [
            (multiply, (pipeline, tiles, K, 0, BY_COLUMNS_A, BY_COLUMNS_B)),
            (multiply, (pipeline, tiles, K, 1, BY_COLUMNS_A, BY_COLUMNS_B)),
            (write, (pipeline, ctx, counts, epoch, peers_products, bias, out, first, parts, num_parts, share, rows, chunk,
                     N, stride_om, stride_on, GROUP, COUNTS, ADDS, BIASED)),
            (load, (pipeline, ctx, counts, epoch, tensor_map_own, tensor_map_a, tensor_map_b, first, parts, num_parts,
                    share, chunk, N, K, GROUP, AWAITS, BY_COLUMNS_A, BY_COLUMNS_B)),
        ],
        WARPS,
        REGISTERS,
    )  # fmt: skip
