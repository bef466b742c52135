"""The context that the operators of fused operations name their ranks by, and their products where weights differ."""

from typing import cast

import torch

from iris.ccl.functional import find
from iris.errors import InvalidGroupError, MismatchedCollectiveError
from iris.ops import vendor
from iris.ops.call import GATHERS_A, Call
from iris.ops.operations import OperationsContext
from iris.runtime.process_groups import none_if_all


def context_named(ranks: str) -> OperationsContext:
    """Whose ranks they are: all of a context's, since the fused operations are among these."""
    context, group = find(ranks)
    if none_if_all(group, context.num_ranks) is not None:
        raise InvalidGroupError(
            "The fused operations are among all ranks of a context, and this is the name of a group. Take "
            "iris.ccl.functional.name_of(ctx)."
        )
    return cast(OperationsContext, context)


def multiply(context: OperationsContext, call: Call) -> None:
    """Carry a product: fused where all ranks' B have one shape, as that needs, and else a product and a collective.

    Compilers put products there, and a weight may be split unevenly. Collective; blocks the host at a shape of B that
    is new here.

    Raises
    ------
    MismatchedCollectiveError
        On all ranks, if they differ in what is moved, or if they differ and are fp8.
    """
    even = context.num_ranks == 1 or _is_even(context, call)
    # Where B has no columns, and A is to be left besides, there is nothing to fuse.
    if even and (call.gathered is None or call.b.shape[1]):
        # Results that operators return lie apart from all else.
        context.ops._run(call, None, False, None, apart=True)
    else:
        with torch.no_grad():
            vendor.in_steps(context, call)


def _is_even(context: OperationsContext, call: Call) -> bool:
    """Whether this call's B has one shape on all ranks.

    How they differ may be another in each layer. So once ranks differ, no call that moves the same is fused any more.
    """
    (K, N), gathers = call.b.shape, call.name in GATHERS_A
    moved, own = (K, N) if gathers else (N, K)
    shapes = context.ops.even
    key = (call.name, moved, call.a.dtype, call.out.dtype)
    known = shapes.get(key, ())
    if known is None or own in known:
        return known is not None
    group = context._world.group
    everyones = group.all_gather([K, N], f"the comparison of the shapes of B in {call.title}", orders=False)
    if all(each == everyones[0] for each in everyones):
        shapes[key] = {*known, own}
        return True
    if len({each[0 if gathers else 1] for each in everyones}) > 1 or vendor.problem(call) or call.a.itemsize == 1:
        theirs = "; ".join(f"rank {rank} has {each}" for rank, each in zip(group.ranks, everyones, strict=True))
        raise MismatchedCollectiveError(
            f"The B of {call.title} has another shape on each rank: {theirs}. Split the weight evenly, or pad it."
        )
    shapes[key] = None
    return False
