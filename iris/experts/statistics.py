"""What kernels count, where `ExpertsConfig.statistics` asks for it: rows of experts, and the time waited for each rank.

Without it kernels have none of this: the argument is None, and what it guards is not compiled.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from iris.language.clock import clock


class Statistics(NamedTuple):
    """On the device, since `ctx.experts` or the last time that a program has set them to zero, on its stream.

    They are added to by the kernels of this rank; each is the memory itself, no copy.
    """

    rows: torch.Tensor
    """int64 ``[local experts]``: rows that dispatches have brought to each of this rank's experts."""
    dispatch_wait_ns: torch.Tensor
    """int64 ``[ranks]``: nanoseconds that dispatches have waited for what each rank sends, as sums over programs."""
    combine_wait_ns: torch.Tensor
    """The same of combines."""


@triton.jit
def count_rows(statistics, expert, total, mask):
    """Add what a dispatch has brought, by one program. Launches that do so follow each other."""
    if statistics is not None:
        at = statistics.rows + expert
        tl.store(at, tl.load(at, mask=mask, other=0) + total, mask=mask)


@triton.jit
def begin_wait(statistics):
    """The time, or nothing where nobody asks."""
    begun = tl.cast(0, tl.int64)
    if statistics is not None:
        begun = clock()
    return begun


@triton.jit
def end_dispatch_wait(statistics, source, begun):
    """``source``: the rank that was waited for."""
    if statistics is not None:
        tl.atomic_add(statistics.dispatch_wait_ns + source, clock() - begun, sem="relaxed", scope="gpu")


@triton.jit
def end_combine_wait(statistics, source, begun):
    if statistics is not None:
        tl.atomic_add(statistics.combine_wait_ns + source, clock() - begun, sem="relaxed", scope="gpu")
