"""What comes of checking a result: what is wrong with it, and how far it is from the exact one."""

from typing import NamedTuple

import torch
import torch.distributed as dist

from iris.bench.ranks import on_any_rank
from iris.context import Iris


class Checked(NamedTuple):
    """``reason``: what is wrong, in words, if anything is. ``error``: see `relative_error`; None if not computed."""

    reason: str
    error: float | None = None


def relative_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """The root of the mean square of the differences, over that of what is exact, in float64."""
    exact = exact.double()
    return ((result.double() - exact).square().mean() / exact.square().mean()).sqrt().item()


def of_all_ranks(ctx: Iris, checked: Checked) -> Checked:
    """What is wrong on any rank, and the largest error; the same on all ranks. Collective over the world."""
    reason = on_any_rank(ctx, checked.reason)
    if reason or checked.error is None:
        return Checked(reason)
    largest = torch.tensor(checked.error, dtype=torch.float64, device=ctx.device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return Checked("", largest.item())
