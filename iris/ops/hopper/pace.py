"""Stores to peers, spread over the product that they go on beside.

A multiprocessor's TMA carries out what it is asked for one after the other, so a store that the link does not take at
once holds up the loader's fetches behind it. Tiles are ready on all multiprocessors at about the same time; if all sent
theirs at once, the link would be too slow for a while and the product stand still, and then the link would have nothing
to do (docs/performance.md, "Fused operations"). So the strips of a tile leave by turns, evenly over the time until the
next tile is ready. Behind a program's last tile there is no product to hold up, and they leave at once.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris.language.address import in_simulator
from iris.language.context import aggregate
from iris.language.ordering import gluon_ordering

cycles = gluon_ordering.cycles

# Of the time until the next tile, in per cent: the last strips need some of it to arrive.
SHARE = gl.constexpr(95)


@aggregate
class Pace:
    """When strips are due, in cycles: the first of a tile at ``begin``, and one every ``step``; ``time``: a tile's.

    Without `PACED` all are due at once.
    """

    begin: gl.tensor
    time: gl.tensor
    step: gl.tensor
    PACED: gl.constexpr

    @triton.constexpr_function
    def __init__(self, begin, time, step, PACED):
        self.begin = begin
        self.time = time
        self.step = step
        self.PACED = gl.constexpr(PACED)


@gluon.jit
def at_once():
    """For stores that nothing need go on beside, as where the link takes longer than the product."""
    never = gl.to_tensor(0)
    return Pace(never, never, never, False)


@gluon.jit
def from_now():
    """Before the first tile."""
    now = cycles()
    return Pace(now, now, now, True)


@gluon.jit
def for_tile(pace, units, number, splits, strips):
    """Of unit ``number``, whose products are there, a tile in ``splits``: its ``strips`` are to go until the next unit.

    A tile takes what the last one did. But where strips held that up, they would hold up this one as long if they took
    their time from it: so it takes little more than the one before.
    """
    if pace.PACED:
        now = cycles()
        time = gl.minimum((now - pace.begin) * splits, pace.time + pace.time // 8)
        following = number + gl.num_programs(0)
        _, _, next_splits = units.at(following)
        step = time // next_splits * SHARE // (100 * strips)
        return Pace(now, time, gl.where(following < units.count(), step, 0), True)
    else:
        return pace


@gluon.jit
def await_turn(pace, strip):
    """Until it is strip number ``strip``'s turn."""
    if pace.PACED and not in_simulator():
        due = pace.begin + strip * pace.step
        while cycles() < due:
            pass
