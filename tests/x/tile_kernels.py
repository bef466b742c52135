"""One kernel for each tile primitive: a program a tile, whose values are loaded from ``values``."""

import triton
import triton.language as tl

import iris
from iris import DeviceContext


@triton.jit
def tile_at(values, M, N, pid_m, pid_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    columns = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    data = tl.load(values + rows * N + columns, mask=(rows < M) & (columns < N), other=0.0)
    return iris.x.Tile(pid_m, pid_n, BLOCK_M, BLOCK_N, data)


@triton.jit
def all_gather(context, values, dst, M, N, MS, NS, sm, sn, DIM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    ctx = DeviceContext.initialize(context)
    tile = tile_at(values, M, N, tl.program_id(0), tl.program_id(1), BM, BN)
    iris.x.all_gather(tile, iris.x.make_tensor_view(dst, MS, NS, sm, sn), DIM, ctx)


@triton.jit
def all_to_all(
    context,
    values,
    src,
    dst,
    M,
    N,
    per_rank,
    src_m,
    src_n,
    dst_m,
    dst_n,
    HOLDS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    ctx = DeviceContext.initialize(context)
    pid_m, pid_n = tl.program_id(0), tl.program_id(1)
    src_view = iris.x.make_tensor_view(src, M, N, src_m, src_n)
    dst_view = iris.x.make_tensor_view(dst, M, N, dst_m, dst_n)
    if HOLDS:
        iris.x.all_to_all(tile_at(values, M, N, pid_m, pid_n, BM, BN), src_view, dst_view, per_rank, ctx)
    else:
        iris.x.all_to_all(iris.x.TileView(pid_m, pid_n, BM, BN), src_view, dst_view, per_rank, ctx)


@triton.jit
def gather(context, src, dst, M, N, src_m, src_n, source, BM: tl.constexpr, BN: tl.constexpr):
    ctx = DeviceContext.initialize(context)
    pid_m, pid_n = tl.program_id(0), tl.program_id(1)
    tile = iris.x.TileView(pid_m, pid_n, BM, BN)
    data = iris.x.gather(tile, iris.x.make_tensor_view(src, M, N, src_m, src_n), source, ctx)
    rows = pid_m * BM + tl.arange(0, BM)[:, None]
    columns = pid_n * BN + tl.arange(0, BN)[None, :]
    # The whole block, so that what is past the edge shows too.
    tl.store(dst + rows * (tl.num_programs(1) * BN) + columns, data)


@triton.jit
def all_reduce(
    context,
    values,
    src,
    dst,
    locks,
    M,
    N,
    src_m,
    src_n,
    dst_m,
    dst_n,
    calls,
    step,
    VARIANT: tl.constexpr,
    HOLDS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """``calls`` of them, of values ``step`` elements apart, into results ``step`` apart, one after the other."""
    ctx = DeviceContext.initialize(context)
    pid_m, pid_n = tl.program_id(0), tl.program_id(1)
    config = iris.x.AllReduceConfig(VARIANT) if VARIANT == "atomic" else iris.x.AllReduceConfig(VARIANT, locks)
    for call in range(calls):
        src_view = iris.x.make_tensor_view(src, M, N, src_m, src_n)
        dst_view = iris.x.make_tensor_view(dst + call * step, M, N, dst_m, dst_n)
        if HOLDS:
            tile = tile_at(values + call * step, M, N, pid_m, pid_n, BM, BN)
            iris.x.all_reduce(tile, src_view, dst_view, config, ctx)
        else:
            iris.x.all_reduce(iris.x.TileView(pid_m, pid_n, BM, BN), src_view, dst_view, config, ctx)


@triton.jit
def reduce_scatter(
    context,
    values,
    src,
    dst,
    locks,
    M,
    N,
    src_m,
    src_n,
    dst_m,
    dst_n,
    shard,
    calls,
    step,
    dst_step,
    HOLDS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    ctx = DeviceContext.initialize(context)
    pid_m, pid_n = tl.program_id(0), tl.program_id(1)
    for call in range(calls):
        src_view = iris.x.make_tensor_view(src, M, N, src_m, src_n)
        dst_view = iris.x.make_tensor_view(dst + call * dst_step, shard, N, dst_m, dst_n)
        if HOLDS:
            tile = tile_at(values + call * step, M, N, pid_m, pid_n, BM, BN)
            iris.x.reduce_scatter(tile, src_view, dst_view, locks, ctx)
        else:
            iris.x.reduce_scatter(iris.x.TileView(pid_m, pid_n, BM, BN), src_view, dst_view, locks, ctx)


@triton.jit
def written_lock(
    context, values, src, dst, locks, M, N, shard, write, OPERATION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """A call as older programs make it: store the tile, set the tile's lock to ``write`` (unless 0), and then call."""
    ctx = DeviceContext.initialize(context)
    pid_m, pid_n = tl.program_id(0), tl.program_id(1)
    tile = tile_at(values, M, N, pid_m, pid_n, BM, BN)
    src_view, dst_view = iris.x.make_tensor_view(src, M, N, N, 1), iris.x.make_tensor_view(dst, M, N, N, 1)
    if write != 0:
        tl.atomic_xchg(locks + src_view.number_of(tile), write, sem="release", scope="sys")
    if OPERATION == "one_shot":
        iris.x.all_reduce_one_shot(tile, src_view, dst_view, locks, ctx)
    elif OPERATION == "two_shot":
        iris.x.all_reduce_two_shot(tile, src_view, dst_view, locks, ctx)
    elif OPERATION == "reduce_scatter":
        iris.x.reduce_scatter(tile, src_view, iris.x.make_tensor_view(dst, shard, N, N, 1), locks, ctx)
    else:
        iris.x.all_reduce_spinlock(tile, dst_view, locks, ctx)


@triton.jit
def mistaken(context, dst, locks, M, N, WHAT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    ctx = DeviceContext.initialize(context)
    view, place = iris.x.make_tensor_view(dst, M, N, N, 1), iris.x.TileView(0, 0, BM, BN)
    if WHAT == "data":
        iris.x.all_gather(place, view, 0, ctx)
    elif WHAT == "view":
        iris.x.all_reduce_one_shot(place, view, dst, locks, ctx)
    elif WHAT == "tile":
        iris.x.gather(dst, view, 0, ctx)
    elif WHAT == "dim":
        iris.x.all_gather(iris.x.Tile(0, 0, BM, BN, iris.x.gather(place, view, ctx.cur_rank, ctx)), view, -1, ctx)
    elif WHAT == "no locks":
        iris.x.all_reduce(place, view, view, iris.x.AllReduceConfig("two_shot"), ctx)
    elif WHAT == "locks":
        iris.x.reduce_scatter(place, view, view, dst, ctx)
    elif WHAT == "unsigned locks":
        unsigned = tl.cast(locks, tl.pointer_type(tl.uint32), bitcast=True)
        iris.x.all_reduce_one_shot(place, view, view, unsigned, ctx)
    elif WHAT == "config":
        iris.x.all_reduce(place, view, view, "one_shot", ctx)
    elif WHAT == "variant":
        iris.x.all_reduce(place, view, view, iris.x.AllReduceConfig("ring", locks), ctx)
    else:
        iris.x.gather(place, view, 0, context)


# What is said where something else was given in this place.
MISTAKES = {
    "data": r"all_gather\(\) takes iris.x.Tile\(.*, data\), and got a TileView, which has no data",
    "view": r"all_reduce_one_shot\(\) takes dst as iris.x.make_tensor_view\(.*\), and got a pointer",
    "tile": r"gather\(\) takes iris.x.Tile\(.*\) or TileView\(.*\), and got a pointer",
    "dim": r"dim=-1 is not possible; it takes one of 0, 1",
    "no locks": r"all_reduce_two_shot\(\) takes locks as a pointer to int32 or int64 .*, and got None",
    "locks": r"reduce_scatter\(\) takes locks as a pointer to int32 or int64 .*, and got a pointer to \w",
    "unsigned locks": r"all_reduce_one_shot\(\) takes locks .* int32 or int64 .*, and got a pointer to uint32",
    "config": r"all_reduce\(\) takes config as iris.x.AllReduceConfig\(variant, locks\), and got a str",
    "variant": r"variant='ring' is not possible; it takes one of 'one_shot', 'two_shot', 'atomic', 'spinlock'",
    "context": r"gather\(\) takes the context that iris.DeviceContext.initialize\(.*\) makes, and got a pointer",
}
