"""The vendor's collectives among all ranks of a call: NCCL's or RCCL's on GPUs, in the simulator Gloo's.

They have a communicator of their own, made at the first call that takes it, so that they are there for groups whose
backend is "iris" as well. Sums are formed in the vendor's order, and rounded as it does.
"""

import torch

from iris.ccl.config import ReduceOp
from iris.world import Rail
from iris.world.rail import as_bytes


class Vendor:
    """By a ``rail`` that has all ranks. Tensors are contiguous; ``call`` and roots are as for `Rail`.

    Each method is enqueued on the current stream, or over, in the simulator, when it returns.
    """

    def __init__(self, rail: Rail) -> None:
        self._rail = rail

    def all_gather(self, output: torch.Tensor, input: torch.Tensor, call: str) -> None:
        # Its own place is read, and written with what it holds. Gloo reads and writes in no order.
        begin, end = output.data_ptr(), output.data_ptr() + output.nbytes
        inside = begin <= input.data_ptr() < end and output.device.type == "cpu"
        self._rail.all_gather(as_bytes(output), as_bytes(input.clone() if inside else input), call)()

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor, call: str) -> None:
        """Row r of ``input`` goes to rank r; ``(W, n)``."""
        self._rail.all_to_all(output, input, call)()

    def broadcast(self, tensor: torch.Tensor, root: int, call: str) -> None:
        self._rail.broadcast(tensor, root, call)()

    def all_reduce(self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp, call: str) -> None:
        if output.data_ptr() != input.data_ptr():
            output.copy_(input)
        self._rail.all_reduce(output, op.name, call)

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp, call: str) -> None:
        self._rail.reduce_scatter(output, input, op.name, call)

    def reduce(
        self, output: torch.Tensor | None, input: torch.Tensor, op: ReduceOp, root: int, here: bool, call: str
    ) -> None:
        """``output``: on the root, where it may be the ``input``. The input of other ranks stays as it is."""
        in_place = here and output is not None and output.data_ptr() == input.data_ptr()
        moved = input if in_place else input.clone()
        self._rail.reduce(moved, root, op.name, call)
        if here and output is not None and not in_place:
            output.copy_(moved)
