"""Every operation of `iris.x`, of one tile a rank, as a function and as a method of the context."""

import triton
import triton.language as tl

import iris
from iris import DeviceContext


@triton.jit
def operate(
    context, values, src, dst, locks, wide, OP: tl.constexpr, METHOD: tl.constexpr, B: tl.constexpr, W: tl.constexpr
):
    """``values``, ``src``: [B, B]; ``dst``: [W B, B]; ``wide``: [B, W B]."""
    ctx = DeviceContext.initialize(context)
    rows, columns = tl.arange(0, B)[:, None], tl.arange(0, B)[None, :]
    tile = iris.Tile(0, 0, B, B, tl.load(values + rows * B + columns))
    place = iris.TileView(0, 0, B, B)
    a = iris.make_tensor_view(src, B, B, B, 1)
    c = iris.make_tensor_view(dst, B, B, B, 1)
    gathered = iris.make_tensor_view(dst, W * B, B, B, 1)
    exchanged = iris.make_tensor_view(wide, B, W * B, W * B, 1)
    if OP == "all_gather":
        if METHOD:
            ctx.all_gather(tile, gathered, 0)
        else:
            iris.x.all_gather(tile, gathered, 0, ctx)
    elif OP == "all_to_all":
        for number in range(W):
            part = iris.Tile(0, number, B, B, tile.data + number)
            if METHOD:
                ctx.all_to_all(part, exchanged, exchanged, B)
            else:
                iris.x.all_to_all(part, exchanged, exchanged, B, ctx)
    elif OP == "gather":
        if METHOD:
            data = ctx.gather(place, a, W - 1)
        else:
            data = iris.x.gather(place, a, W - 1, ctx)
        tl.store(dst + rows * B + columns, data)
    elif OP == "all_reduce":
        config = iris.AllReduceConfig("one_shot", locks)
        if METHOD:
            ctx.all_reduce(tile, a, c, config)
        else:
            iris.x.all_reduce(tile, a, c, config, ctx)
    elif OP == "all_reduce_atomic":
        if METHOD:
            ctx.all_reduce_atomic(tile, c)
        else:
            iris.x.all_reduce_atomic(tile, c, ctx)
    elif OP == "all_reduce_spinlock":
        if METHOD:
            ctx.all_reduce_spinlock(tile, c, locks)
        else:
            iris.x.all_reduce_spinlock(tile, c, locks, ctx)
    elif OP == "all_reduce_one_shot":
        if METHOD:
            ctx.all_reduce_one_shot(tile, a, c, locks)
        else:
            iris.x.all_reduce_one_shot(tile, a, c, locks, ctx)
    elif OP == "all_reduce_two_shot":
        if METHOD:
            ctx.all_reduce_two_shot(tile, a, c, locks)
        else:
            iris.x.all_reduce_two_shot(tile, a, c, locks, ctx)
    else:
        if METHOD:
            ctx.reduce_scatter(tile, a, c, locks)
        else:
            iris.x.reduce_scatter(tile, a, c, locks, ctx)
