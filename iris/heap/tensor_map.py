"""One tensor map for the same matrix on every rank.

A tensor map describes one tensor, and TMA computes addresses from it without asking what lies between the elements. So
the copies of a matrix on all ranks are slices of one tensor of three dimensions: the first one's stride is a number of
bytes that divides the distances of the ranks' memory in this process, and a rank's slice is its distance from the
lowest in such steps.
"""

import math

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from iris.cuda_graphs.kept import keep
from iris.heap.mapping import Mapping

ELEMENTS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
# TMA's strides are below 2^40 bytes (CUDA driver API, cuTensorMapEncodeTiled).
LARGEST_STEP = 1 << 30


def places(mapping: Mapping) -> torch.Tensor:
    """The slice of each rank: int32 ``[W]``, on the mapping's device."""
    lowest, step = min(mapping.bases), _step(mapping)
    slices = [(base - lowest) // step for base in mapping.bases]
    return keep(lambda: torch.tensor(slices, dtype=torch.int32, device=mapping.device), mapping.device)


def peers_map(mapping: Mapping, matrix: torch.Tensor, block: list[int]) -> TensorDescriptor:
    """A map of the copies on all ranks of ``matrix``, by rows, which lies in this rank's memory of ``mapping``."""
    offset = matrix.data_ptr() - mapping.bases[mapping.rank]
    lowest = min(range(len(mapping.bases)), key=mapping.bases.__getitem__)
    step = _step(mapping)
    first = mapping.peer(lowest)[offset : offset + matrix.itemsize].view(matrix.dtype)
    shape = [(max(mapping.bases) - min(mapping.bases)) // step + 1, *matrix.shape]
    strides = [step // matrix.itemsize, matrix.stride(0), 1]
    layout = gl.NVMMASharedLayout.get_default_for([1, *block], ELEMENTS[matrix.dtype])
    return TensorDescriptor(first, shape, strides, [1, *block], layout)


def _step(mapping: Mapping) -> int:
    return math.gcd(LARGEST_STEP, *(base - min(mapping.bases) for base in mapping.bases))
