"""A collective as it is asked for, and what an algorithm can carry of such calls."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from iris.ccl.communicator import Communicator, Launch
from iris.ccl.config import DEFAULT, Config
from iris.ccl.reduction import Elements, Op, elements
from iris.cuda_graphs.capture import Line


def extent(tensor: torch.Tensor) -> int:
    """Bytes from the first element of a tensor to the end of its last one."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.itemsize * (1 + sum((size - 1) * stride for size, stride in steps)) if tensor.numel() else 0


class Call(NamedTuple):
    """One collective on one rank. A launch that is prepared for it serves all calls of tensors that lie like these.

    Attributes
    ----------
    collective : str
        Its name in `ctx.ccl`.
    output, input : torch.Tensor
        Elements lie in memory in their order; rows of an ``input`` that is gathered or exchanged may be apart, and so
        may the ranks' rows of the ``output`` of all_gather, and of the ``input`` of reduce_scatter. A rank that only
        sends, or only receives, passes the same tensor as both.
    line : Line
        What orders the call among others: a stream or, in CUDA graphs, a line of graphs (`iris.cuda_graphs.capture`).
    root : int
        The root's rank in the group; of a message, the other rank.
    op : ReduceOp or PREMUL_SUM
        Of a reduction.
    more : tuple of torch.Tensor
        What a kernel takes after the output: PREMUL_SUM's factors ``[W]``, in the type that sums are formed in; or the
        counts and displacements of all_to_all_v, int64 ``[W]`` each.
    config : Config
    """

    collective: str
    comm: Communicator
    output: torch.Tensor
    input: torch.Tensor
    line: Line
    root: int = 0
    op: Op | None = None
    more: tuple[torch.Tensor, ...] = ()
    config: Config = DEFAULT

    @property
    def elements(self) -> Elements:
        """Of a reduction: what kernels take the elements for, and the operation on these."""
        assert self.op is not None
        return elements(self.input.dtype, self.op)

    @property
    def send_step(self) -> int:
        """Of a reduce_scatter: from one rank's part of the input to the next one's, in `elements`.

        Parts follow each other, unless the input has a row for each that lies apart (`iris.ccl.within_host`).
        """
        input, each = self.input, self.elements.each
        return each * (self.output.numel() if input.is_contiguous() else input.stride(0))

    @property
    def table_bytes(self) -> int:
        """The bytes by which `iris.ccl.select` chooses: of the input, or of a rank's piece of it in all_to_all."""
        return self.input.nbytes // self.comm.size if self.collective == "all_to_all" else self.input.nbytes


@dataclass(frozen=True)
class Algorithm:
    """A row of the table in `iris.ccl.algorithms`.

    Every algorithm carries tensors anywhere on the device, at any address that their dtype allows, and can be captured
    in a CUDA graph. The rest is said here.

    Attributes
    ----------
    name : str
        As the tables of `iris.ccl.select` and `Config.all_reduce_variant` call it.
    collectives : tuple of str
    launch : callable
        Prepares a launch for a `Call`, with so many programs at most (None: as many as it sees fit).
    dtypes : frozenset of torch.dtype
        Of the elements that it combines. None: all that `iris.ccl.reduction` has.
    ops : frozenset of str
        The operations. None: all.
    min_ranks : int
    fits : callable
        Whether it carries ``(comm, collective, nbytes)``, where ``nbytes`` is `Call.table_bytes`. None: any size.
    has_room : callable
        Whether there is memory for a call that fits, with at most so many programs. Asked where this algorithm would be
        chosen, and if there is, it is. None: always.
    unless : tuple of str
        Fields of `Config` that it could not follow: where one is set, another algorithm is chosen.
    on_request : bool
        Chosen only where the configuration names it.
    in_rank_order : bool
        Of reductions: every element is added up in the order of ranks, whatever the call's size.
    limits : str
        What an error says to who asks for it by name and gives it another dtype or operation.
    """

    name: str
    collectives: tuple[str, ...]
    launch: Callable[[Call, int | None], Launch]
    dtypes: frozenset[torch.dtype] | None = None
    ops: frozenset[str] | None = None
    min_ranks: int = 1
    fits: Callable[[Communicator, str, int], bool] | None = None
    has_room: Callable[[Call, int | None], bool] | None = None
    unless: tuple[str, ...] = ()
    on_request: bool = False
    in_rank_order: bool = True
    limits: str = ""

    def carries(self, comm: Communicator, collective: str, nbytes: int) -> bool:
        """Whether it may be chosen for so many bytes among the ranks of ``comm``."""
        return (
            collective in self.collectives
            and not self.on_request
            and comm.size >= self.min_ranks
            and (self.fits is None or self.fits(comm, collective, nbytes))
        )
