"""The context that the operators of fused operations name their ranks by."""

from typing import cast

import torch.distributed as dist

from iris.ccl.functional import find
from iris.errors import InvalidGroupError
from iris.ops.operations import OperationsContext


def context_named(ranks: str) -> OperationsContext:
    """Whose ranks they are: all of a context's, since the fused operations are among these."""
    context, group = find(ranks)
    if group not in (None, dist.group.WORLD):
        raise InvalidGroupError(
            "The fused operations are among all ranks of a context, and this is the name of a group. Take "
            "iris.ccl.functional.name_of(ctx)."
        )
    return cast(OperationsContext, context)
