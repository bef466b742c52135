"""Tiles that several programs compute, each for a part of K: split-K, for the last tiles of a launch.

Programs take tiles by rounds, one each, and the last round is seldom full. So its tiles are split: ``splits`` programs
multiply a part of K each, and are done in a part of the time.

The program of the last split adds up. The others leave their products, in float32, in ``partials``, and count in
``arrived``, by tile and half of its rows, since each multiplier has a half and waits for no other. Sums are in the
order of splits, the last one first: the same bits in every call. To and from the L2 cache, for each split tile:
``splits`` - 1 times its elements, of 4 bytes; nothing over the link.

Why nobody waits in a circle: the splits that one waits for come earlier in the order of units, in which programs take
them, and every program goes through its own in that order. Why ``partials`` may be written again: the call before is
over, as launches of a stream follow each other, and only one stream uses them. ``arrived`` is never reset: each call
adds ``splits`` - 1 to it, so at that many times the epoch all of this call is there, and nothing of the next one.
"""

import triton
from triton.experimental.gluon import language as gl

from iris.language.jit import gluon_jit
from iris.language.jit import triton_aggregate as aggregate
from iris.language.ordering import signal


@aggregate
class Units:
    """What the programs of a launch do, by number: each unit is a tile or a split of one.

    ``ticket``: what programs take them by, if they do (`iris.ops.hopper.tile_scheduler`).
    """

    tiles: gl.tensor
    splits: gl.tensor
    last: gl.tensor
    partials: gl.tensor
    arrived: gl.tensor
    epoch: gl.tensor
    ticket: gl.tensor
    SPLIT: gl.constexpr

    @triton.constexpr_function
    def __init__(self, tiles, splits, last, partials, arrived, epoch, ticket, SPLIT):
        self.tiles = tiles
        self.splits = splits
        self.last = last
        self.partials = partials
        self.arrived = arrived
        self.epoch = epoch
        self.ticket = ticket
        self.SPLIT = gl.constexpr(SPLIT)

    @gluon_jit
    def count(self):
        if self.SPLIT:
            return self.tiles + self.last * (self.splits - 1)
        else:
            return self.tiles

    @gluon_jit
    def at(self, number):
        """The tile of a unit, which split of it this is, and of how many."""
        if self.SPLIT:
            # After the tiles that are whole.
            past_whole = number - (self.tiles - self.last)
            return (
                gl.where(past_whole < 0, number, number - past_whole + past_whole // self.splits),
                gl.where(past_whole < 0, 0, past_whole % self.splits),
                gl.where(past_whole < 0, 1, self.splits),
            )
        else:
            return number, 0, 1

    @gluon_jit
    def slot(self, tile):
        """Of a split tile: which of them it is."""
        return tile - (self.tiles - self.last)


@gluon_jit
def whole_tiles(tiles, counts, epoch, ticket):
    """Units none of which is a split. Nothing reads the fields that splits would need: any values of their types do."""
    return Units(
        tiles=tiles,
        splits=tiles,
        last=tiles,
        partials=counts,
        arrived=counts,
        epoch=epoch,
        ticket=ticket,
        SPLIT=False,
    )


@gluon_jit
def part_of_depth(split, splits, K, BLOCK_K: gl.constexpr):
    """Where in K a split begins, and where it ends: whole blocks, of which there are at least as many as splits."""
    blocks = gl.cdiv(K, BLOCK_K)
    return split * blocks // splits * BLOCK_K, (split + 1) * blocks // splits * BLOCK_K


@gluon_jit
def flat(products):
    """The products in the order in which threads have them: four neighbours are a thread's, 128 a warp's.

    Of 16 rows a warp has, of every 8 columns a thread has two in the row of its number by 4 and two 8 rows below (PTX
    ISA, "Register Fragments for wgmma.mma_async.m64nNk16"). By rows each access would be one of 32 bytes in 8 lines of
    memory, and as many requests to the L2 cache as the loader has made for all of the tile.
    """
    ROWS: gl.constexpr = products.shape[0]
    COLUMNS: gl.constexpr = products.shape[1]
    parts = products.reshape([ROWS // 64, 4, 2, 8, COLUMNS // 8, 4, 2])
    return parts.permute((0, 4, 1, 3, 5, 2, 6)).reshape([ROWS * COLUMNS])


@gluon_jit
def by_rows(products, like):
    """What `flat` is given, from what it returns."""
    ROWS: gl.constexpr = like.shape[0]
    COLUMNS: gl.constexpr = like.shape[1]
    parts = products.reshape([ROWS // 64, COLUMNS // 8, 4, 8, 4, 2, 2]).permute((0, 2, 5, 3, 1, 4, 6))
    return gl.convert_layout(parts.reshape([ROWS, COLUMNS]), like.type.layout, assert_trivial=True)


@gluon_jit
def partial_of(units, tile, split, like, HALF: gl.constexpr):
    """Pointers to a split's products of one half of a tile's rows, `flat` as ``like`` is."""
    number = (units.slot(tile) * (units.splits - 1) + split) * 2 + HALF
    i = gl.arange(0, like.shape[0], like.type.layout)
    return units.partials + number.to(gl.int64) * like.shape[0] + i


@gluon_jit
def hand_over(units, tile, split, products, HALF: gl.constexpr):
    """Leave the products of any split but the last.

    The count is released after them, for this GPU, whose programs alone acquire it, in `add_up`.
    """
    values = flat(products)
    gl.store(partial_of(units, tile, split, values, HALF=HALF), values)
    signal(units.arrived + 2 * units.slot(tile) + HALF, 1, "add", "gpu")


@gluon_jit
def add_up(units, ctx, tile, products, HALF: gl.constexpr):
    """The products of the last split plus those of all others, some of which may still be under way."""
    ctx.wait(units.arrived + 2 * units.slot(tile) + HALF, units.epoch * (units.splits - 1), cmp="reached")
    total = flat(products)
    for split in range(units.splits - 1):
        total += gl.load(partial_of(units, tile, split, total, HALF=HALF))
    return by_rows(total, products)
