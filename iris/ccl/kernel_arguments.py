"""What kernels of collectives take, by name: the NamedTuples of their arguments, for what belongs together.

Input, output, and the tensors of `iris.ccl.call.Call.more` are arguments of their own, since each launch gives them
anew (`iris.ccl.kernel_launch`). Why others are too, and what the JIT makes of the fields: `iris.ops.kernel_arguments`.
"""

from typing import Any, NamedTuple


class LamportChannel(NamedTuple):
    """What ranks push elements through that are their own flags: `iris.ccl.lamport_all_reduce`."""

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
