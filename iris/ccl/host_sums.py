"""The sum over hosts of what each host has summed: in the order of hosts, and rounded once.

Hosts round their own sums, too, to the type of the result; with `Config.fp32_partials` they send these as float32, and
the sum over hosts alone is rounded.

It runs on one rank and waits for nobody. Every rank that adds up the same parts gets the same bits.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from iris.ccl.combine import accumulate, accumulator, finalize
from iris.ccl.config import ReduceOp
from iris.ccl.kernel_launch import as_words
from iris.ccl.reduction import PREMUL_SUM, Op, elements
from iris.runtime.launch import addresses, prepare, remember

# Elements of a program.
BLOCK = 4096


@triton.jit
def sum_over_hosts(
    parts, output, n, HOSTS: tl.constexpr, SUMMANDS: tl.constexpr, OP: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    element: tl.constexpr = output.dtype.element_ty
    total = tl.zeros([BLOCK], accumulator(element))
    for host in tl.static_range(HOSTS):
        total = accumulate(total, tl.load(parts + host * n + i, mask=mask), None, host, OP=OP)
    tl.store(output + i, finalize(total, element, SUMMANDS, OP), mask=mask)


def partial_dtype(dtype: torch.dtype, op: Op) -> torch.dtype:
    """In which hosts send what they have combined, for `Config.fp32_partials`: where the type itself would round it."""
    if op in (ReduceOp.MIN, ReduceOp.MAX) or not (dtype.is_floating_point or dtype.is_complex):
        return dtype
    each = elements(dtype, op)
    if each.dtype.itemsize >= 4:
        return dtype
    return torch.complex64 if dtype.is_complex else torch.float32


# Launches that were prepared, by what makes one differ from another.
_launches: dict[tuple, Callable[..., None]] = {}


def add_up(output: torch.Tensor, parts: torch.Tensor, op: Op, stream: int | None, summands: int | None = None) -> None:
    """Combine the rows of ``parts``, one a host, into ``output``: ``(H, n)`` → ``(n,)``, contiguous, on one device.

    It is enqueued on the stream with this handle; None in the simulator. ``parts`` are of the output's dtype, or of
    `partial_dtype`. ``summands``: what AVG divides by. By default hosts have averaged already, so it is the average of
    averages. They have multiplied by the ranks' factors for PREMUL_SUM.
    """
    if not output.numel():
        return
    kind = elements(output.dtype, op)
    n = kind.number_in(output)
    words = as_words(parts, elements(parts.dtype, op).dtype), as_words(output, kind.dtype)
    numbers = n, len(parts), summands or len(parts), "sum" if op is PREMUL_SUM else kind.op, BLOCK
    key = (output.device, parts.dtype, kind.dtype, *numbers, *(word.data_ptr() % 16 for word in words))
    if key not in _launches:
        # Not early: it has no `gdc_wait`.
        grid = (triton.cdiv(n, BLOCK), 1, 1)
        remember(_launches, key, prepare(sum_over_hosts, grid, *words, *numbers, early=False))
    _launches[key](stream, addresses((*words, *numbers)))
