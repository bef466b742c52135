"""The algorithms of `iris.x.all_reduce`, by name."""

import triton
import triton.language as tl

from iris.errors import InvalidTileError
from iris.language.jit import triton_aggregate as aggregate
from iris.x.atomic import all_reduce_atomic
from iris.x.one_shot import all_reduce_one_shot
from iris.x.spinlock import all_reduce_spinlock
from iris.x.tile import check_choice, describe, kept
from iris.x.two_shot import all_reduce_two_shot


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
