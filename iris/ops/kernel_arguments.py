"""What kernels take, by name: the NamedTuples of their arguments, for what belongs together, and `by_name`.

The JIT specialises the fields of a NamedTuple as it does other arguments: a stride of 1, and None, are constants in the
kernel, and a pointer's or a number's divisibility by 16 is known. A launch is given the fields one after the other. An
option such as ``do_not_specialize`` holds for all fields of a parameter.

Two limits of Triton: a tensor map is an argument of its own, since the launcher of Triton 3.6 does not look for one in
a tuple; and a field is no constant unless it is 1 or None, so constants have a tuple of their own, which is a
``tl.constexpr`` as a whole.
"""

from typing import Any, NamedTuple

import torch


class Channel(NamedTuple):
    """What the ranks of a call tell each other by."""

    context: Any
    """The context of the workspace, from which a kernel makes a `iris.DeviceContext`."""
    counts: Any
    """int32, in the workspace: see `iris.ops.counts`."""


class Matrix(NamedTuple):
    """A matrix by the address of its first element, and the elements from a row to the next, and from a column."""

    ptr: Any
    row_stride: Any
    column_stride: Any


class Epilogue(NamedTuple):
    """What becomes of a product before it is stored. What is None is left out."""

    bias: Any
    """An element for each column, added to the sum."""
    scale_a: Any
    """float32, what the rows of A are multiplied by."""
    scale_b: Any
    """float32, what the columns of B are multiplied by."""


class Tiling(NamedTuple):
    """How a kernel in Triton computes a product: a constant of it."""

    BLOCK_M: int
    """Rows, columns and depth of a tile."""
    BLOCK_N: int
    BLOCK_K: int
    GROUP: int = 1
    """Rows of tiles that are computed together: `iris.ops.gemm.swizzle_tile`."""
    XCDS: int = 1
    """Chiplets, and programs that follow each other on one: `iris.ops.gemm.remap_xcd`."""
    CHUNK: int = 1
    CACHE_A: str = ""
    """Cache modifiers of loads of A and B."""
    CACHE_B: str = ""
    ALLOW_TF32: bool = False
    """Whether float32 is rounded to TF32 for the product."""


class Sending(NamedTuple):
    """How a kernel in Triton sends A: a constant of it."""

    PROGRAMS: int
    """Those that send first."""
    ROWS: int
    """Rows and columns of A that a program sends at a time."""
    COLUMNS: int


def matrix(tensor: torch.Tensor) -> Matrix:
    """The tensor as kernels take it."""
    return Matrix(tensor, *tensor.stride())


def by_name(kernel: Any, **arguments: object) -> tuple:
    """The arguments in the order of the kernel's parameters. Raises TypeError unless each has one."""
    names = kernel.arg_names
    if len(arguments) == len(names):
        try:
            return tuple([arguments[name] for name in names])
        except KeyError:
            pass
    missing = [name for name in names if name not in arguments]
    unknown = [name for name in arguments if name not in names]
    raise TypeError(f"{kernel.fn.__name__}() has no parameters {unknown}, and is given no arguments for {missing}.")
