"""What `all_reduce_preamble` returns: proof that the calls it was made for have their memory."""

from dataclasses import dataclass

import torch

from iris.ccl.communicator import Communicator
from iris.errors import InvalidCollectiveError, WorkspaceTooSmallError, readable, short_repr


@dataclass(frozen=True)
class Preparation:
    """For all_reduce of tensors that are no larger.

    Attributes
    ----------
    communicator : Communicator
        Of the group that was given, or of all ranks.
    size : int
        Bytes of the largest input.
    dtype : torch.dtype
    any_group : bool
        Whether no group was given: then it is for those of any group of the context.
    """

    communicator: Communicator
    size: int
    dtype: torch.dtype
    any_group: bool = False

    def covers(self, comm: Communicator, output: torch.Tensor, input: torch.Tensor) -> bool:
        """Whether a call may use it."""
        return self._covers_group(comm) and input.dtype == self.dtype and input.nbytes <= self.size

    def check(self, comm: Communicator, output: torch.Tensor, input: torch.Tensor) -> None:
        """Raise `WorkspaceTooSmallError` unless a call may use it."""
        if self.covers(comm, output, input):
            return
        if self._covers_group(comm):
            mine, other = f"{readable(self.size)} of {self.dtype}", f"has {readable(input.nbytes)} of {input.dtype}"
        elif comm.heap is self.communicator.heap:
            mine, other = f"the group of ranks {self.communicator.ranks}", f"is of the group of ranks {comm.ranks}"
            if comm.ranks == self.communicator.ranks:
                other = "is of another group of the same ranks"
        else:
            mine, other = "another Iris context", "is of this one"
        raise WorkspaceTooSmallError(
            f"The workspace was prepared for {mine}; this all_reduce {other}. Call all_reduce_preamble() with these "
            "tensors and this group; one that is called without a group is for all groups of its context."
        )

    def _covers_group(self, comm: Communicator) -> bool:
        return comm is self.communicator or (self.any_group and comm.heap is self.communicator.heap)


def check_preparation(workspace: object) -> Preparation:
    """``workspace``, if it is one."""
    if not isinstance(workspace, Preparation):
        raise InvalidCollectiveError(f"workspace={short_repr(workspace)} is not what all_reduce_preamble() returned.")
    return workspace
