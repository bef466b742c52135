"""The Hopper kernels' plans, which a model chooses that small matrices mean nothing to."""

import contextlib
from unittest import mock

from iris.ops.hopper import arguments


@contextlib.contextmanager
def planned(ctx, plan):
    """While this lasts, the plan of every fused operation of the context; None leaves the choice to it."""
    hopper = ctx.ops._algorithms["hopper"]
    # Of calls like earlier ones nothing is planned.
    ctx.ops._known.forget()
    if plan is not None:
        hopper.plan = lambda call, config: plan
    try:
        yield
    finally:
        hopper.__dict__.pop("plan", None)
        ctx.ops._known.forget()


def short_chunks():
    """While this lasts, rows of a gathered A are sent in as many chunks as those of a large one."""
    return mock.patch.multiple(arguments, LEAST_CHUNK_BYTES=1, LEAST_CHUNK_ROWS=1)
