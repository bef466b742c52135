"""For each group of rows the sum of products of two rows: what the gradient of a group's matrix is.

By torch's grouped GEMM where there is one. What that makes of a group without rows is undefined, so a kernel zeroes the
matrices of such groups, and reads nothing: a pass over all matrices, which have more elements than the rows where
groups are small, takes longer than the products.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from iris import simulator
from iris.language.dependent_launch import gdc_wait
from iris.runtime.launch import enqueue

# Bytes that torch's grouped GEMM wants rows to be a multiple of.
TORCH_ROW = 16
# Elements that a program zeroes at once, and programs a group.
BLOCK, PROGRAMS, NUM_WARPS = 4096, 16, 4


@triton.jit
def zero_empty_groups(matrices, offsets, SIZE, BLOCK: tl.constexpr):
    """``matrices``: ``[E, SIZE]``, contiguous. ``offsets``: ``[E + 1]``, where groups of rows begin and end.

    The first number of a program is its group's.
    """
    gdc_wait()
    group = tl.program_id(0)
    if tl.load(offsets + group) == tl.load(offsets + group + 1):
        begin = matrices + tl.cast(group, tl.int64) * SIZE
        for block in range(tl.program_id(1), tl.cdiv(SIZE, BLOCK), tl.num_programs(1)):
            at = block * BLOCK + tl.arange(0, BLOCK)
            tl.store(begin + at, tl.zeros((BLOCK,), matrices.dtype.element_ty), mask=at < SIZE)


def sums_of_groups(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """``left[rows of g]^T right[rows of g]`` for each group g: ``[R, M]``, ``[R, N]`` -> ``[E, M, N]``.

    ``offsets``: int32 ``[E + 1]``. Group g has the rows from ``offsets[g]`` to ``offsets[g + 1]``, which are all read.
    """
    multiply = getattr(torch.nn.functional, "grouped_mm", None)  # from torch 2.10 on
    if multiply is None or any(each.shape[1] * each.itemsize % TORCH_ROW for each in (left, right)):
        ends = offsets.tolist()
        return torch.stack([left[begin:end].t() @ right[begin:end] for begin, end in zip(ends, ends[1:], strict=False)])
    made = multiply(left.t(), right, offs=offsets[1:])
    _zero_empty(made, offsets)
    return made


def _zero_empty(matrices: Tensor, offsets: Tensor) -> None:
    assert matrices.is_contiguous()
    grid = len(matrices), 1 if simulator.ACTIVE else PROGRAMS, 1
    size = matrices[0].numel()
    enqueue(zero_empty_groups, grid, matrices.device.index, matrices, offsets, size, BLOCK, num_warps=NUM_WARPS)
