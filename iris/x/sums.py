"""Tiles of all ranks, added up.

Sums are formed in float32 (float64 for float64, integers in their own type; of booleans they are the logical "or") and
rounded once, except in the atomic and spinlock variants, which add to what is in memory already, in the order in which
ranks come.

How ranks signal that a tile is there, and has been read: `iris.x.locks`.

Programs wait for their peers here. So all ranks call for the same tiles, and the programs that do so are resident at
once, or take their tiles in the same order.
"""

import triton
import triton.language as tl

from iris.ccl.combine import accumulator
from iris.errors import InvalidTileError
from iris.language.jit import triton_aggregate as aggregate
from iris.language.ordering import lock as lock_of
from iris.language.ordering import unlock as unlock_of
from iris.x.locks import PERIOD, SIGNAL, arrived, begin, finish, report, signal_all
from iris.x.tile import check, check_choice, check_locks, columns_of, describe, kept, rows_of


@aggregate
class AllReduceConfig:
    """How `all_reduce` adds up: ``variant`` "one_shot", "two_shot", "atomic" or "spinlock", and its ``locks``.

    "atomic" has none.
    """

    variant: tl.constexpr
    locks: tl.tensor | tl.constexpr

    @triton.constexpr_function
    def __init__(self, variant, locks=None):
        self.variant, self.locks = tl.constexpr(variant), kept(locks)


@triton.constexpr_function
def check_config(config):
    """Raise unless this is an `AllReduceConfig`."""
    if not hasattr(config, "variant"):
        raise InvalidTileError(
            f"all_reduce() takes config as iris.x.AllReduceConfig(variant, locks), and got {describe(config)}."
        )


@triton.jit
def all_reduce(tile, src, dst, config, ctx):
    """`all_reduce_one_shot`, or another variant, as an `AllReduceConfig` says."""
    check_config(config)
    check_choice("variant", config.variant, "one_shot", "two_shot", "atomic", "spinlock")
    if config.variant == "one_shot":
        all_reduce_one_shot(tile, src, dst, config.locks, ctx=ctx)
    elif config.variant == "two_shot":
        all_reduce_two_shot(tile, src, dst, config.locks, ctx=ctx)
    elif config.variant == "spinlock":
        all_reduce_spinlock(tile, dst, config.locks, ctx)
    else:
        all_reduce_atomic(tile, dst, ctx)


@triton.jit
def all_reduce_atomic(tile, dst, ctx):
    """Add a tile to every rank's ``dst``, atomically, in the type of ``dst``.

    ``dst``: ``[M, N]``, on the heap of every rank, with what the sum begins with, zeros for example. It is complete
    behind a barrier. Over the link: the tile, once to each peer, in one step.
    """
    check("all_reduce_atomic", ctx, tile, True, dst=dst)
    rows, columns = rows_of(tile), columns_of(tile)
    mask = (rows < dst.M) & (columns < dst.N)
    data = tile.data.to(dst.ptr.dtype.element_ty)
    for distance in range(1, ctx.num_ranks + 1):
        to = (ctx.cur_rank + distance) % ctx.num_ranks
        ctx.atomic_add(dst.at(rows, columns), data, to, mask=mask, sem="relaxed")


@triton.jit
def all_reduce_spinlock(tile, dst, locks, ctx):
    """Add a tile to every rank's ``dst``, one rank at a time, in float32 but rounded to the type of ``dst`` each time.

    ``dst`` as in `all_reduce_atomic`, and of any type. ``locks``: one a tile, 0 while free: an array of its own,
    whose locks do not count. Over the link: the tile, twice for each peer, in two steps and those of the lock.
    """
    check("all_reduce_spinlock", ctx, tile, True, dst=dst)
    check_locks("all_reduce_spinlock", locks)
    rows, columns = rows_of(tile), columns_of(tile)
    mask = (rows < dst.M) & (columns < dst.N)
    element: tl.constexpr = dst.ptr.dtype.element_ty
    ACC: tl.constexpr = accumulator(element)
    for distance in range(1, ctx.num_ranks + 1):
        to = (ctx.cur_rank + distance) % ctx.num_ranks
        lock = ctx.translate(locks + dst.number_of(tile), to)
        at = ctx.translate(dst.at(rows, columns), to)
        taken = lock_of(lock, ctx._record())
        if taken == 0:
            total = tl.load(at, mask=mask, other=0.0).to(ACC) + tile.data.to(ACC)
            tl.store(at, total.to(element), mask=mask)
            unlock_of(lock)
        else:
            report(locks + dst.number_of(tile), taken, to, ctx)


@triton.jit
def add_up(pointers, mask, element: tl.constexpr, ctx):
    """The sum of all ranks' values, in the order of ranks, so that it has the same bits wherever it is formed."""
    total = ctx.load(pointers, 0, mask=mask, other=0.0).to(accumulator(element))
    for rank in range(1, ctx.num_ranks):
        total += ctx.load(pointers, rank, mask=mask, other=0.0).to(accumulator(element))
    return total


@triton.jit
def all_reduce_one_shot(tile, src, dst, locks, ctx):
    """Add up a tile of all ranks on each of them: few bytes, one step.

    ``src``: ``[M, N]``, on the heap of every rank. A `Tile` is stored there first, and may not be changed by others; of
    a `TileView` it is there, and may be changed on return. ``dst``: ``[M, N]``, anywhere, and not ``src``. On return
    the sum lies there, the same bits on all ranks. ``locks``: an array of ``src``'s own, zeros once, to which callers
    write nothing: the call itself signals the others that the tile is there. Over the link: W - 1 tiles in, in one step
    behind a signal.
    """
    check("all_reduce_one_shot", ctx, tile, False, src=src, dst=dst)
    check_locks("all_reduce_one_shot", locks)
    lock = locks + src.number_of(tile)
    start, good = begin(tile, src, lock, ctx)
    if good:
        signal_all(lock, SIGNAL, ctx)
        if arrived(lock, start + SIGNAL * ctx.num_ranks, ctx):
            rows, columns = rows_of(tile), columns_of(tile)
            mask = (rows < src.M) & (columns < src.N)
            total = add_up(src.at(rows, columns), mask, src.ptr.dtype.element_ty, ctx)
            tl.store(dst.at(rows, columns), total.to(dst.ptr.dtype.element_ty), mask=mask)
            finish(tile, lock, start, ctx)


@triton.jit
def all_reduce_two_shot(tile, src, dst, locks, ctx):
    """Add up a tile of all ranks on one of them, which stores the sum to all: the fewest bytes, two steps.

    ``src`` and ``locks`` as in `all_reduce_one_shot`; ``dst`` too, but on the heap of every rank. Tiles are added up by
    the ranks in turn. Over the link, on average over W tiles: (W - 1) / W tiles in for the sum, and as much out.
    """
    check("all_reduce_two_shot", ctx, tile, False, src=src, dst=dst)
    check_locks("all_reduce_two_shot", locks)
    number = src.number_of(tile)
    lock = locks + number
    start, good = begin(tile, src, lock, ctx)
    owner = number % ctx.num_ranks
    if good:
        if ctx.cur_rank != owner:
            ctx.signal(lock, SIGNAL, owner, op="add")
            arrived(lock, start + PERIOD, ctx)
        elif arrived(lock, start + SIGNAL * (ctx.num_ranks - 1), ctx):
            rows, columns = rows_of(tile), columns_of(tile)
            mask = (rows < src.M) & (columns < src.N)
            total = add_up(src.at(rows, columns), mask, src.ptr.dtype.element_ty, ctx).to(dst.ptr.dtype.element_ty)
            for distance in range(1, ctx.num_ranks + 1):
                ctx.store(dst.at(rows, columns), total, (owner + distance) % ctx.num_ranks, mask=mask)
            for distance in range(1, ctx.num_ranks):
                ctx.signal(lock, PERIOD, (owner + distance) % ctx.num_ranks, op="add")
            ctx.signal(lock, PERIOD - SIGNAL * (ctx.num_ranks - 1), owner, op="add")


@triton.jit
def reduce_scatter(tile, src, dst, locks, ctx):
    """Add up the rows of a tile that are this rank's, of all ranks' tiles.

    ``src``: ``[M, N]``, and ``locks``, as in `all_reduce_one_shot`. Each rank has ceil(M / W) of these rows, one rank
    behind the other; where W does not divide M the last ranks have fewer, or none. ``dst``: ``[ceil(M / W), N]``,
    anywhere; it gets this rank's rows, and what lies behind them is left alone. All ranks call for all tiles, which may
    have rows of several ranks. Over the link: this rank's rows of W - 1 tiles in, in one step behind a signal.
    """
    check("reduce_scatter", ctx, tile, False, src=src, dst=dst)
    check_locks("reduce_scatter", locks)
    lock = locks + src.number_of(tile)
    start, good = begin(tile, src, lock, ctx)
    if good:
        signal_all(lock, SIGNAL, ctx)
        if arrived(lock, start + SIGNAL * ctx.num_ranks, ctx):
            rows, columns = rows_of(tile), columns_of(tile)
            # By src, which has one shape on all ranks: a rank that has fewer rows may pass a dst of just these.
            shard = tl.cdiv(src.M, ctx.num_ranks)
            first = ctx.cur_rank * shard
            mine = (rows >= first) & (rows < first + tl.minimum(shard, dst.M))
            mask = mine & (rows < src.M) & (columns < src.N)
            total = add_up(src.at(rows, columns), mask, src.ptr.dtype.element_ty, ctx)
            tl.store(dst.at(rows - first, columns), total.to(dst.ptr.dtype.element_ty), mask=mask)
            finish(tile, lock, start, ctx)
