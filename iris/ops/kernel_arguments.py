"""What kernels take, by name: the NamedTuples of their arguments, for what belongs together, and `by_name`.

The JIT specialises the fields of a NamedTuple as it does other arguments: a stride of 1, and None, are constants in the
kernel, and a pointer's or a number's divisibility by 16 is known. A launch is given the fields one after the other.

Three limits of Triton. A tensor map is an argument of its own, since the launcher of Triton 3.6 does not look for one
in a tuple. So is what must not be specialised, such as a number of rows, which may be 1: ``do_not_specialize`` does not
reach into tuples. And a field is no constant unless it is 1 or None, so constants have a tuple of their own, which is a
``tl.constexpr`` as a whole.
"""

from typing import Any, NamedTuple

import torch


class Channel(NamedTuple):
    """The memory by which the ranks of a call signal each other."""

    context: Any
    """The context of the workspace, from which a kernel makes a `iris.DeviceContext`."""
    counts: Any
    """int32, in the workspace: see `iris.ops.counts`."""


class Matrix(NamedTuple):
    """A matrix: the address of its first element, and the elements from one row, or column, to the next."""

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


class Cdna3Tiling(NamedTuple):
    """How a kernel for CDNA3 computes a product: a constant of it. What is called alike is as in `Tiling`."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    GROUP: int
    XCDS: int
    CHUNK: int
    BY_LINES_A: bool
    """Whether neighbours in memory are of one row of A, and of one column of B."""
    BY_LINES_B: bool


class HopperTiling(NamedTuple):
    """How a kernel for Hopper computes a product: a constant of it. What is called alike is as in `Tiling`."""

    BLOCK_M: int
    BLOCK_N: int
    STAGES: int
    """Tiles of A and B in shared memory: `iris.ops.hopper.pipeline`."""
    GROUP: int
    TRANS_A: bool
    """Whether the tensor map is one of the matrix's transpose, since it lies by columns."""
    TRANS_B: bool
    SCALE_A_PER_ROW: bool
    """Whether each row of A has a factor, or all have one."""
    SCALE_B_PER_COLUMN: bool
    SPLIT: bool = False
    """Whether several programs compute a tile: `iris.ops.hopper.split_k`."""
    ALL_REDUCE: bool = False
    """Whether a sum goes to all ranks, or its rows are shared among them."""
    PACED: bool = False
    """Whether stores are spread over the next product: `iris.ops.hopper.pace`."""


class SplitTiles(NamedTuple):
    """What programs that compute a tile together have: `iris.ops.hopper.split_k`."""

    partials: Any
    """float32: the products of all but the last split."""
    arrived: Any
    """int32: how many of them are there."""


class Extents(NamedTuple):
    """Of a product: columns and depth."""

    N: Any
    K: Any
    chunk: Any = None
    """Of a gathered A, the rows that are sent together at least."""


class TilePlace(NamedTuple):
    """Where a tile begins, and where its rows end."""

    row: Any
    column: Any
    stop: Any


class Sending(NamedTuple):
    """How a kernel in Triton sends A: a constant of it."""

    PROGRAMS: int
    """Those that send first."""
    ROWS: int
    """Rows and columns of A that a program sends at a time."""
    COLUMNS: int


class NormChannel(NamedTuple):
    """What the ranks of an RMSNorm with its all-reduce tell each other by: `iris.ops.all_reduce_rms_norm`."""

    context: Any
    epochs: Any
    """int32, a number for each piece of a row: that of its calls so far, modulo the slots."""
    partials: Any
    """int64: LL messages of the programs of a row to each other."""
    slots: Any
    """What peers send, in words of the input's size."""


class ShardedNormChannel(NamedTuple):
    """The same with a residual that is sharded by rows: `iris.ops.sharded_rms_norm`."""

    context: Any
    epochs: Any
    partials: Any
    parts: Any
    """What peers send of the rows that are to be added up here, in words of the input's size."""
    results: Any
    """What peers send of the rows that they own, in words of the size of ``out``."""
    factors: Any
    """int64: LL messages, the factors of these rows."""


class NormTensors(NamedTuple):
    """What RMSNorm is called with. What is None is left out."""

    input: Any
    residual: Any
    """Added to the sums, and written."""
    weight: Any
    out: Any
    scale: Any
    """float32, one number, by which ``out`` is divided."""
    row_scales: Any
    """float32, for each row: written, and what ``out`` is divided by."""


class RowDivision(NamedTuple):
    """How the rows of RMSNorm are divided among programs: a constant of the kernel."""

    H: int
    """Elements of a row."""
    PIECES: int
    """Of a row, with a program each if there are several."""
    PIECE: int
    """Elements of a piece, rounded up to a power of two."""
    PART: int
    """Elements of a piece that a rank adds up; and these rounded up to a power of two."""
    BLOCK: int
    LANES: int
    """Of a word that programs of a row tell each other: as many as a program has threads, or more."""
    CLUSTERED: bool
    """Whether the programs of a row are a cluster."""
    EARLY: bool
    """Whether there is room for the next launch beside this one while it waits."""
    ONE_EACH: bool
    """Whether every program has one piece."""


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
