"""out = the rows of all ranks' A, times B: copy engines send A, and the loader waits for what it fetches.

A rank's rows are cut in chunks. `start` meets all ranks, so that their memory may be written; then the copy engine
sends each chunk to a peer, and behind it, on the same stream, one word: the epoch, into ``arrived`` of that chunk there
(`iris.ops.hopper.sender`). All multiprocessors multiply, from the rank's own rows on, which nobody has to send; then
the rows of its right neighbour, and so on, which is the order in which they come. What comes last may be multiplied by
several programs a tile (`iris.ops.hopper.split_k`).

Over the link, each rank: its ``[m, K]`` of A to every peer, W - 1 times m K elements out, in one step. No
multiprocessor moves any of it (docs/performance.md, "Fused operations").

Why a chunk is there when its word is: copies of a stream follow each other (CUDA C++ Programming Guide, "Streams"). The
loader reads the word with acquire, and orders its TMA behind that. Why both may be written again in the next call:
`start` of that meets all ranks, and a rank comes there when its last call is over.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris.language.context import DeviceContext, IrisDeviceCtx
from iris.language.ordering import gluon_ordering
from iris.ops.counts import ARRIVED, triton_counts
from iris.ops.gemm import gluon_place
from iris.ops.hopper.pipeline import (
    REGISTERS,
    WARPS,
    await_products,
    free_products,
    load_tile,
    make_pipeline,
    multiply,
    store_products,
)
from iris.ops.hopper.split_k import Units

order_bulk_copies, gluon_follow = gluon_ordering.order_bulk_copies, gluon_ordering.follow_predecessor
await_ready, begin, end, triton_follow = (
    triton_counts.await_ready, triton_counts.begin, triton_counts.end, triton_counts.follow_predecessor,
)  # fmt: skip


@triton.jit
def start(context_tensor, counts, W: tl.constexpr):
    """One program: the next epoch, in ``counts[0]``, once all ranks' memory may be written. A word to each peer."""
    triton_follow()
    ctx = DeviceContext.initialize(context_tensor, num_ranks=W)
    epoch = begin(ctx, counts)
    await_ready(ctx, counts, epoch)
    end(counts, epoch)


@gluon.jit
def tile_of(number, rank, W: gl.constexpr, tiles_m, tiles_n, chunks, GROUP: gl.constexpr):
    """Whose rows the tile is of, in which chunk of them, and its row and column there."""
    chunk = number // (tiles_m * tiles_n)
    pid_m, pid_n = gluon_place(number % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP)
    return (rank + chunk // chunks) % W, chunk % chunks, pid_m, pid_n


@gluon.jit
def load(pipeline, units, ctx, counts, a, gathered, b, m, chunk, N, K, GROUP: gl.constexpr, BY_COLUMNS_B: gl.constexpr):
    """The loader's part."""
    BLOCK_M: gl.constexpr = 2 * pipeline.products.shape[2]
    BLOCK_N: gl.constexpr = pipeline.products.shape[0] // 2 * pipeline.products.shape[3]
    tiles_m, tiles_n, chunks = chunk // BLOCK_M, gl.cdiv(N, BLOCK_N), gl.cdiv(m, chunk)
    step = 0
    for unit in range(gl.program_id(0), units.count(), gl.num_programs(0)):
        number, split, splits = units.at(unit)
        owner, nth, pid_m, pid_n = tile_of(number, ctx.cur_rank, ctx.num_ranks, tiles_m, tiles_n, chunks, GROUP)
        row, column = nth * chunk + pid_m * BLOCK_M, pid_n * BLOCK_N
        if owner == ctx.cur_rank:
            step = load_tile(pipeline, a, b, row, column, K, split, splits, step, False, BY_COLUMNS_B)
        else:
            ctx.wait(counts + ARRIVED + owner * chunks + nth, units.epoch, cmp="reached")
            order_bulk_copies()
            row += owner * chunks * chunk
            step = load_tile(pipeline, gathered, b, row, column, K, split, splits, step, False, BY_COLUMNS_B)


@gluon.jit
def write(
    pipeline, units, rank, W: gl.constexpr, bias, out, m, chunk, N, stride_om, stride_on, GROUP: gl.constexpr,
    BIASED: gl.constexpr,
):  # fmt: skip
    """The writer's part."""
    BLOCK_M: gl.constexpr = 2 * pipeline.products.shape[2]
    BLOCK_N: gl.constexpr = pipeline.products.shape[0] // 2 * pipeline.products.shape[3]
    tiles_m, tiles_n, chunks = chunk // BLOCK_M, gl.cdiv(N, BLOCK_N), gl.cdiv(m, chunk)
    done = 0
    for unit in range(gl.program_id(0), units.count(), gl.num_programs(0)):
        number, split, splits = units.at(unit)
        if split == splits - 1:
            owner, nth, pid_m, pid_n = tile_of(number, rank, W, tiles_m, tiles_n, chunks, GROUP)
            row, stop = owner * m + nth * chunk + pid_m * BLOCK_M, (owner + 1) * m
            await_products(pipeline, done)
            store_products(pipeline, bias, out, row, pid_n * BLOCK_N, stop, N, stride_om, stride_on, BIASED)
            free_products(pipeline)
            done += 1


# A number of tiles may be 1, and is no constant then.
@gluon.jit(do_not_specialize=["splits", "last"])
def hopper_all_gather_matmul(
    context_tensor,
    counts,
    tensor_map_a,
    tensor_map_gathered,
    tensor_map_b,
    bias,
    out,
    partials,
    arrived,
    m,
    chunk,
    N,
    K,
    stride_om,
    stride_on,
    splits,
    last,
    W: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    SPLIT: gl.constexpr,
    GROUP: gl.constexpr,
    BY_COLUMNS_B: gl.constexpr,
    BIASED: gl.constexpr,
):
    """A is this rank's ``[m, K]``, gathered ``[W, chunks * chunk, K]``, by rows; ``out``: ``[W * m, N]``, anywhere.

    ``chunk``: rows that arrive together, a multiple of ``BLOCK_M``. Those of another rank begin where a tile does, so
    that none is fetched while it arrives: what a tile has behind a rank's last row is nobody's.

    ``splits``, ``last``, ``partials``, ``arrived``: of tiles that are split (`iris.ops.hopper.split_k`).
    """
    gluon_follow()
    ctx = IrisDeviceCtx.initialize(context_tensor, num_ranks=W)
    epoch = gl.load(counts)
    pipeline = make_pipeline(tensor_map_a, tensor_map_b, out.dtype.element_ty, BLOCK_M, BLOCK_N, STAGES)
    tiles = W * gl.cdiv(m, chunk) * (chunk // BLOCK_M) * gl.cdiv(N, BLOCK_N)
    units = Units(tiles, splits, last, partials, arrived, epoch, SPLIT)
    gl.warp_specialize(
        [
            (multiply, (pipeline, ctx, units, K, 0, False, BY_COLUMNS_B)),
            (multiply, (pipeline, ctx, units, K, 1, False, BY_COLUMNS_B)),
            (write, (pipeline, units, ctx.cur_rank, W, bias, out, m, chunk, N, stride_om, stride_on, GROUP, BIASED)),
            (load, (pipeline, units, ctx, counts, tensor_map_a, tensor_map_gathered, tensor_map_b, m, chunk, N, K,
                    GROUP, BY_COLUMNS_B)),
        ],
        WARPS,
        REGISTERS,
    )  # fmt: skip
