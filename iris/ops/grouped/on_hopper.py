"""Which grouped GEMMs the kernel for Hopper is for, and what it is launched with."""

import functools
from typing import Any

import torch

from iris.heap.tensor_map import ELEMENTS
from iris.ops.config import FusedConfig
from iris.ops.grouped.call import GroupedCall
from iris.ops.grouped.kernel_arguments import SCALE_BLOCK, GroupedExtents, GroupedTiling
from iris.ops.grouped.stages import stages_of
from iris.ops.hopper import arguments as hopper

# Bytes of each row of a tile of A and B: what TMA's layout of shared memory keeps together.
DEPTH = 128
BLOCK_M = 128
# Of H100 and H200 with SXM.
MULTIPROCESSORS = 132


def problem(call: GroupedCall, config: FusedConfig) -> str | None:
    """Why the kernel is not for this call, if it is not."""
    narrow, K = call.mat_a.itemsize == 1, call.mat_b.shape[1]
    if not hopper.is_hopper():
        return "the Gluon kernel is for GPUs of compute capability 9.0"
    if call.mat_a.dtype not in hopper.OPERANDS or call.out.dtype not in ELEMENTS:
        return "the Gluon kernel is for A and B of fp16, bf16 or fp8, and a result of fp16 or bf16"
    if not K or not len(call.mat_b):
        return "the Gluon kernel is for matrices that are not empty"
    rows_of_a, columns_of_b = map(stacked, (call.mat_a, call.mat_b.transpose(1, 2)))
    if rows_of_a is None:
        return "TMA accesses an A whose rows are contiguous, and begin at multiples of 16 bytes as far as its groups do"
    if columns_of_b is None and (narrow or call.gated or K % config.block_size_k or stacked(call.mat_b) is None):
        return (
            "TMA accesses a B whose columns are contiguous, and begin at multiples of 16 bytes as far as its groups "
            "do; or its rows, of fp16 and bf16 without an activation, and of a K that block_size_k divides"
        )
    return _problem_of_tiles(call, config) or _problem_of_scales(call, config)


def _problem_of_tiles(call: GroupedCall, config: FusedConfig) -> str | None:
    narrow, least = call.mat_a.itemsize == 1, 128 if call.gated else 64
    M, N = config.block_size_m, config.block_size_n
    if M != BLOCK_M or N not in (64, 128, 256) or N < least:
        return f"the Gluon kernel has tiles of {BLOCK_M} rows, and {least} to 256 columns of B"
    most = hopper.LARGEST_TILE_OF_FP8 if narrow and not call.blocked else hopper.LARGEST_TILE
    if M * N > most:
        return f"the Gluon kernel has tiles of {most} elements at most, of {call.mat_a.dtype}"
    if config.block_size_k * call.mat_a.itemsize != DEPTH:
        return f"the Gluon kernel has a block_size_k of {DEPTH // call.mat_a.itemsize}, of {call.mat_a.dtype}"
    return None


def _problem_of_scales(call: GroupedCall, config: FusedConfig) -> str | None:
    if not call.blocked:
        return None
    if call.mat_a.itemsize > 1:
        return "the Gluon kernel takes scales of blocks with fp8 alone"
    assert call.scale_a is not None or call.scale_b is not None
    if call.scale_b is not None and call.scale_b.dim() == 2:
        return "the Gluon kernel takes a scale for each column of B without scales of blocks of A"
    if call.gated and call.columns % SCALE_BLOCK:
        return f"with an activation, scales of blocks need halves of B of a multiple of {SCALE_BLOCK} columns"
    return None


def stacked(tensor: torch.Tensor) -> tuple[torch.Tensor, int] | None:
    """Matrices ``[E, rows, columns]`` as one that TMA can access by rows, and how many rows they lie apart.

    Of one matrix itself, 0 apart. None: they do not lie so.
    """
    groups, (rows, columns) = (1 if tensor.dim() == 2 else len(tensor)), tensor.shape[-2:]
    pitch = 0
    if tensor.dim() == 3:
        step, line = tensor.stride()[:2]
        if groups > 1 and (not line or step % line or step // line < rows):
            return None
        pitch = step // line if groups > 1 else 0
        tensor = tensor.as_strided(((groups - 1) * pitch + rows, columns), tensor.stride()[1:])
    return (tensor, pitch) if hopper.fits_tma(tensor) else None


def hopper_tiles(call: GroupedCall) -> FusedConfig:
    """The largest that spill no registers, or smaller ones where there is not one of these for each multiprocessor.

    Tiles of fp8 have their sums twice, but with scales of blocks, where they have two parts; and factors of lines take
    registers.
    """
    small = not call.blocked and (call.mat_a.itemsize == 1 or call.scale_a is not None or call.scale_b is not None)
    columns, least = 128 if small else 256, 128 if call.gated else 64
    slabs = len(call.mat_b) * -(-call.rows_per_group // BLOCK_M)
    while columns > least and slabs * -(-call.mat_b.shape[2] // columns) < MULTIPROCESSORS:
        columns //= 2
    # Of 4, 8 and 16, the fastest on one H200 for 32 groups of 1024 rows, K = 7168, N = 4096.
    group = 4 if call.blocked else 8
    return _tiles(columns, DEPTH // call.mat_a.itemsize, group)


@functools.cache
def _tiles(columns: int, depth: int, group: int) -> FusedConfig:
    return FusedConfig(
        use_gluon=True, block_size_m=BLOCK_M, block_size_n=columns, block_size_k=depth, group_size_m=group
    )


def stages(call: GroupedCall, config: FusedConfig) -> int:
    """As many as fit beside the products and the groups."""
    M, N, K = config.block_size_m, config.block_size_n, config.block_size_k
    products = 2 * M * N // (2 if call.gated else 1)
    left = hopper.SHARED_MEMORY - 1024 - products - 3 * 4 * call.form().GROUPS
    return min(8, left // (call.mat_a.itemsize * K * (M + N)))


def hopper_arguments(call: GroupedCall, config: FusedConfig, leaving: int) -> dict[str, Any]:
    """Of the kernel for Hopper, but ``out``, scales, groups and their numbers. ``leaving``: as in `GroupedTiling`."""
    M, N, K = config.block_size_m, config.block_size_n, config.block_size_k
    a, b = stacked(call.mat_a), stacked(call.mat_b.transpose(1, 2))
    trans_b = b is not None
    b = b or stacked(call.mat_b)
    assert a is not None and b is not None
    parts = 2 if call.blocked and (call.gated or N > SCALE_BLOCK) else 1
    # With an activation it is fetched by halves in any case.
    of_b = [N // (2 if call.gated else parts), K] if trans_b else [K, N]
    return {
        "tensor_map_a": hopper.tensor_map(a[0], [M // 2, K]),
        "tensor_map_b": hopper.tensor_map(b[0], of_b),
        "extents": GroupedExtents(call.columns, call.mat_b.shape[1], a[1], b[1]),
        "TILING": GroupedTiling(M, N, stages(call, config), config.group_size_m, trans_b, leaving, parts),
        "progress": call.progress,
        "STAGES": stages_of(len(call.mat_b)) if call.progress else None,
    }
