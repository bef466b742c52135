"""``tl.arange`` for kernels that are written once for Triton and Gluon.

Triton chooses the layout by itself. Gluon's version has one in which each thread accesses 16 bytes at a time.
"""

import triton
import triton.language as tl
from triton.experimental.gluon import language as gl

from iris.language.address import bytes_of
from iris.language.jit import gluon_version_of
from iris.language.target import threads_per_warp


@triton.constexpr_function
def flat_layout(block, itemsize, num_warps):
    """A 1-D layout in which each thread has 16 consecutive bytes at a time, or fewer if the block is small."""
    per_thread = max(1, min(16 // itemsize, block // (threads_per_warp() * num_warps)))
    return gl.BlockedLayout([per_thread], [threads_per_warp()], [num_warps], [0])


@triton.jit
def flat(block: tl.constexpr, element: tl.constexpr):
    """0 to ``block - 1``, laid out for accesses to elements of the type ``element``."""
    return tl.arange(0, block)


@gluon_version_of(flat)
def _gluon_flat(block: tl.constexpr, element: tl.constexpr):
    return gl.arange(0, block, layout=flat_layout(block, bytes_of(element), gl.num_warps()))


@triton.jit
def flat_vectors(count: tl.constexpr):
    """0 to ``count - 1``, laid out for accesses to vectors of 16 bytes."""
    return tl.arange(0, count)


@gluon_version_of(flat_vectors)
def _gluon_flat_vectors(count: tl.constexpr):
    return gl.arange(0, count, layout=flat_layout(count, 16, gl.num_warps()))
