"""Stores to peers, spread over the product that they go on beside.

Stores that the link does not take at once hold up what the same multiprocessor's loader fetches: in TMA, which carries
out one after the other what it is asked for, and on their further way, as ordinary stores do, too. Tiles are ready on
all multiprocessors at about the same time; if all sent theirs at once, the link would be too slow for a while and the
product stand still, and then the link would have nothing to do (docs/performance-lessons.md, "Sending beside a
product"). So the strips of a tile leave by turns, evenly over the time until the next tile is ready. After a program's
last tile there is no product to hold up, and they leave at once.

The time is what the product of the tile has taken, by the first multiplier's clock. The multiplier leaves it in shared
memory before the products, when the writer has emptied these of the last tile, and so has read its time. What the
multiplier waited for after the product is not in it: strips that once came late would have those after them take as
long.
"""

import triton
from triton.experimental.gluon import language as gl

from iris.language.address import in_simulator
from iris.language.clock import cycles
from iris.language.jit import gluon_jit
from iris.language.jit import triton_aggregate as aggregate
from iris.ops.hopper.tile_scheduler import one_element


@gluon_jit
def leave_time(took, time):
    """A multiplier, before the products that took so many cycles."""
    took.store(gl.full([1], 0, gl.int64, one_element(gl.num_warps())) + time)


@aggregate
class Pace:
    """When strips are due: number n at ``begin`` + n ``step``, in cycles."""

    begin: gl.tensor
    step: gl.tensor
    PACED: gl.constexpr

    @triton.constexpr_function
    def __init__(self, begin, step, PACED):
        self.begin = begin
        self.step = step
        self.PACED = gl.constexpr(PACED)


@gluon_jit
def at_once():
    """For stores that nothing goes on beside, or that take longer than what does."""
    return Pace(gl.to_tensor(0), gl.to_tensor(0), False)


@gluon_jit
def until_next(took, units, following, splits, strips):
    """For the ``strips`` of a tile in ``splits``, which is there: until the program's next unit, ``following``, is."""
    _, _, next_splits = units.at(following)
    time = gl.sum(took.load(one_element(gl.num_warps())), axis=0) * splits // next_splits
    return Pace(cycles(), gl.where(following < units.count(), time // strips, 0), True)


@gluon_jit
def await_turn(pace, strip):
    """Until it is strip number ``strip``'s turn."""
    if pace.PACED and not in_simulator():
        due = pace.begin + strip * pace.step
        while cycles() < due:
            pass
