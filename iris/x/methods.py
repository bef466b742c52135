"""The operations of `iris.x` as methods of the device context, as older programs call them.

    ctx.all_gather(tile, dst, 0)          # iris.x.all_gather(tile, dst, 0, self)

The arguments are those of the functions, without ``ctx``.
"""

import triton
import triton.language as tl

from iris import simulator
from iris.language.context import DeviceContext
from iris.simulator import aggregates
from iris.x import algorithms, atomic, moves, one_shot, spinlock, two_shot


@triton.jit
def all_gather(self, tile, dst, dim: tl.constexpr):
    """`iris.x.all_gather`."""
    moves.all_gather(tile, dst, dim, self)


@triton.jit
def all_to_all(self, tile, src, dst, N_per_rank):
    """`iris.x.all_to_all`."""
    moves.all_to_all(tile, src, dst, N_per_rank, ctx=self)


@triton.jit
def gather(self, tile, src, source_rank):
    """`iris.x.gather`."""
    return moves.gather(tile, src, source_rank, self)


@triton.jit
def all_reduce(self, tile, src, dst, config):
    """`iris.x.all_reduce`."""
    algorithms.all_reduce(tile, src, dst, config, ctx=self)


@triton.jit
def all_reduce_atomic(self, tile, dst):
    """`iris.x.all_reduce_atomic`."""
    atomic.all_reduce_atomic(tile, dst, self)


@triton.jit
def all_reduce_spinlock(self, tile, dst, locks):
    """`iris.x.all_reduce_spinlock`."""
    spinlock.all_reduce_spinlock(tile, dst, locks, self)


@triton.jit
def all_reduce_one_shot(self, tile, src, dst, locks):
    """`iris.x.all_reduce_one_shot`."""
    one_shot.all_reduce_one_shot(tile, src, dst, locks, ctx=self)


@triton.jit
def all_reduce_two_shot(self, tile, src, dst, locks):
    """`iris.x.all_reduce_two_shot`."""
    two_shot.all_reduce_two_shot(tile, src, dst, locks, ctx=self)


@triton.jit
def reduce_scatter(self, tile, src, dst, locks):
    """`iris.x.reduce_scatter`."""
    one_shot.reduce_scatter(tile, src, dst, locks, ctx=self)


METHODS = {
    "all_gather": all_gather,
    "all_to_all": all_to_all,
    "gather": gather,
    "all_reduce": all_reduce,
    "all_reduce_atomic": all_reduce_atomic,
    "all_reduce_spinlock": all_reduce_spinlock,
    "all_reduce_one_shot": all_reduce_one_shot,
    "all_reduce_two_shot": all_reduce_two_shot,
    "reduce_scatter": reduce_scatter,
}

for _name, _method in METHODS.items():
    if simulator.ACTIVE:
        setattr(DeviceContext, _name, aggregates.method(_method))
    else:
        setattr(DeviceContext, _name, _method)
        # What the place in Triton's cache of kernels with a context depends on: an edit of these recompiles them.
        DeviceContext.hash_attrs.append(_method)
