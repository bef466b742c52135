"""What the kernels of grouped GEMMs take, by name; as `iris.ops.kernel_arguments`, where the limits of Triton are."""

from typing import Any, NamedTuple

# Columns of A, and columns and rows of B, that share a scale: DeepSeek's convention (arXiv:2412.19437, 3.3.2).
SCALE_BLOCK = 128


def groups_up_to(number: int) -> int:
    """The length of a block with an element for each of so many groups: a power of two, and a warp at least."""
    return max(32, 1 << (number - 1).bit_length())


class GroupedMatrix(NamedTuple):
    """Matrices by the address of the first one's first element, and elements from a matrix, row and column to the next.

    Where groups lie one after the other in one matrix, its ``group_stride`` is 0.
    """

    ptr: Any
    group_stride: Any
    row_stride: Any
    column_stride: Any


class GroupedRows(NamedTuple):
    """Which rows are a group's. What is None is left out: `iris.ops.grouped.groups.rows_of`."""

    offs: Any
    """int32 or int64, the row after the room of each group; None if each group has as much room in a matrix of its
    own."""
    counts: Any
    """int32 or int64, how many rows of its room each group has; None for all of them."""


class GroupedForm(NamedTuple):
    """What a kernel computes: a constant of it."""

    GROUPS: int
    """How many groups there are at most, a power of two."""
    GATED: bool
    """Whether the left half of B's columns is a gate of the right half: out = silu(A B_left) * (A B_right)."""
    BLOCKED: bool
    """Whether a scale is one of `SCALE_BLOCK` columns of A."""
    COLUMNS_A_SCALE: int
    """Columns of B that share a scale, if it is not one for all of them: 1 or `SCALE_BLOCK`."""


class GroupedExtents(NamedTuple):
    """Of a product on Hopper: columns of the result and depth, and how far groups lie apart in what TMA fetches."""

    N: Any
    K: Any
    pitch_a: Any
    """Rows of A; 0 where the groups are in one matrix."""
    pitch_b: Any
    """Columns of B, or its rows where they are contiguous."""


class GroupedTiling(NamedTuple):
    """How the kernel for Hopper computes it: a constant of it. What is called alike is as in `HopperTiling`."""

    BLOCK_M: int
    BLOCK_N: int
    """Columns of B."""
    STAGES: int
    GROUP: int
    TRANS_B: bool
    LEAVING: int = 0
    """Programs that end when five eighths of the tiles are done, so that another kernel finds room."""
    PARTS: int = 1
    """In how many parts the columns of B's tile lie and are multiplied, each with a scale of its own. 2 with scales of
    blocks, if the tile is wider than a block or has a gate: the left and the right half of B."""
