"""What a context does with tensors that are there: whether they are symmetric, a peer's copy of one, giving it back."""

import torch

from iris.errors import InvalidArgumentError
from iris.heap import SymmetricHeap
from iris.operators.graph_break import methods_break_graph
from iris.operators.stand_ins import stand_in


@methods_break_graph("the symmetric heap is the host's, and graphs know no addresses")
class SymmetricTensors:
    """Methods for a class that has a ``heap``."""

    heap: SymmetricHeap

    def is_symmetric(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's memory is in this rank's heap. Local."""
        return self.heap.is_symmetric(tensor)

    def as_symmetric(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` itself if it is on the heap, else a contiguous copy there, of the same values, shape and dtype.

        Copying allocates, so either all ranks must copy or none.
        """
        if self.heap.is_symmetric(tensor):
            return tensor
        problem = stand_in(tensor)
        if problem:
            raise InvalidArgumentError(f"as_symmetric() copies tensors with memory of their own, and got {problem}")
        return self.heap.empty(tensor.shape, tensor.dtype).copy_(tensor.detach())

    def free(self, tensor: torch.Tensor) -> None:
        """Give back the memory of ``tensor`` and of all its views, which must not be used any more. Local.

        This is never necessary, as a tensor that dies is freed. The memory is reused when all ranks have freed it and
        met.

        Raises
        ------
        NotSymmetricError
            The tensor was not made on this heap.
        FreedTensorError
            It was freed before.
        """
        self.heap.free(tensor)

    def peer(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """A torch tensor over ``rank``'s copy of ``tensor``, of the same shape, strides and dtype. Local.

        Nothing orders its accesses: put barriers around them. While the result lives, the memory under it is not
        reused.

        Raises
        ------
        NotSymmetricError
            ``tensor`` is not on the heap.
        RankOutOfRangeError
            There is no such rank.
        RemoteRankError
            It is on another host.
        """
        return self.heap.peer(tensor, rank)
