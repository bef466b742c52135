"""What kernels of collectives take, by name: the NamedTuples of their arguments, for what belongs together.

Input, output, and the tensors of `iris.ccl.call.Call.more` are arguments of their own, since each launch gives them
anew (`iris.ccl.kernel_launch`). Why others are too, and what the JIT makes of the fields: `iris.ops.kernel_arguments`.
"""

from typing import Any, NamedTuple


class LamportChannel(NamedTuple):
    """Memory for the calls of one stream (`iris.runtime.workspace`) in which elements are their own flags."""

    context: Any
    """Of the workspace, from which a kernel makes a `iris.DeviceContext`."""
    epochs: Any
    """int32, a number for each block: that of its calls so far, modulo the slots."""
    slots: Any
    """What peers send, in words of the input's size."""
    max_blocks: Any
    """Blocks that a slot has room for."""


class LLChannel(NamedTuple):
    """What ranks send LL messages through: `iris.ccl.one_hop`."""

    context: Any
    epochs: Any
    """int32 ``[blocks, 32]``, of each block and distance between ranks."""
    slots: Any
    """int64: the words, of which half is data and half a flag."""


class PieceLayout(NamedTuple):
    """How pieces lie in input and output, in elements."""

    row: Any
    """Elements of a row."""
    in_pitch: Any
    """From one row of a piece to the next, in the input and the output."""
    out_pitch: Any
    send_step: Any
    """From one receiver's piece to the next in the input, and one sender's in the output."""
    recv_step: Any


class QueueMemory(NamedTuple):
    """The memory of the queues between ranks: `iris.ccl.queue`."""

    context: Any
    counts: Any
    """int32, of each program: how many blocks went to each rank, and came from it."""
    words: Any
    """int64, of each program: what peers tell it."""
    slots: Any
    """What peers send."""
    heap_table: Any = None
    """int64, a row for each region that all ranks reach: where it begins at each rank, then its bytes. For kernels that
    access tensors there. The first is the symmetric heap."""
    regions: Any = 1
    """How many rows there are. Where it is 1 the JIT makes a constant of it."""


class PartLayout(NamedTuple):
    """How a sum is divided, in elements: the tensor, or what each rank wants of it, into blocks, and these into parts.

    With k = ``t * block_step`` + i, element i of part d of block t is the input's element ``d * part_step + k``. There
    is one if ``d * limit_step + k < n``: ``limit_step`` is 0 where each rank wants n elements, and the length of a part
    where all of them together are n.
    """

    n: Any
    part_step: Any
    block_step: Any
    limit_step: Any
    out_part_step: Any
    """As ``part_step``, of the output."""


class BlockTiling(NamedTuple):
    """Elements of a block, and of a slot of the queues: a constant of a kernel."""

    BLOCK: int
    SLOT: int


class PieceTiling(NamedTuple):
    """How `iris.ccl.exchange` cuts a piece into blocks: a constant of it."""

    BLOCK_M: int
    """Rows and columns of a block."""
    BLOCK_N: int
    SLOT: int
    """Elements of a slot of the queues."""
    ROWS: str
    """A piece is "one" row, or rows "apart"; or a block is so many elements of all rows "together", as it is on other
    ranks, where they are one row."""


class ExchangeForm(NamedTuple):
    """Which exchange it is: a constant of `iris.ccl.exchange`."""

    SAME: bool
    """Whether all ranks get the same piece."""
    PARTITIONED: bool
    """Whether a program serves one rank, with a W-th of the others; else its blocks go to every rank."""
    DIRECT: bool
    """Whether receivers say where their results are, and pieces go straight to those on the symmetric heap."""
    PROGRAMS: int
    """Of the largest call, where sizes are compared (`iris.ccl.sizes`); 0 where they are not. Where they are, a rank
    sends or receives, and does not do both."""
    QUEUES: int
    """Programs that have queues, where sizes are compared."""
