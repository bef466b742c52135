"""What a dispatch returns: the rows of this rank's experts, and how many there are."""

from typing import NamedTuple, Protocol

import torch

from iris.cuda_graphs.capture import refuse_in_capture
from iris.errors import ReceivedUsedUpError
from iris.experts.views import Views
from iris.operators.graph_break import methods_break_graph


class HostCounts(NamedTuple):
    """``counts``: rows of each local expert. ``offsets``: where they begin, and where the last one's end."""

    counts: list[int]
    offsets: list[int]


class Owner(Protocol):
    """Who has made it."""

    def release(self, received: "Received") -> None: ...

    def zero_padding(self, received: "Received") -> None: ...


@methods_break_graph("what a dispatch has received is for the host")
class Received:
    """Returned by `ExpertParallel.dispatch`; in use until it is combined or released. Never made by a program.

    Rows of one expert lie one after the other, in the order of ranks and of their tokens; over several hosts in that
    of local ranks, of hosts, and of tokens. What lies after them is
    undefined, and zeros after `zero_padding`. All tensors are on the device, written by the stream of the dispatch; the
    next dispatch in the same memory writes over them.

    Attributes
    ----------
    layout : str
        "expanded" or "compact".
    rows : torch.Tensor
        Expanded: ``[local experts, capacity, hidden]``, where the capacity is ``ranks * max_tokens``. Compact:
        ``[room, hidden]``.
    counts : torch.Tensor
        int32 ``[local experts]``: rows of each of this rank's experts.
    offsets : torch.Tensor
        int32 ``[local experts + 1]``: the row, of ``rows.flatten(0, -2)``, where those of each expert begin. In the
        compact layout each is a multiple of `ExpertsConfig.alignment`, and the last is the end of all.
    scales : torch.Tensor or None
        Of rows of fp8, float32: of the shape of ``rows``, with 1 or ``hidden / 128`` (rounded up) in place of
        ``hidden``: what a row, or each 128 of its elements, is to be multiplied by.
    num_tokens : int
        Of this rank, as they were dispatched; at most, where a tensor said how many there are.
    weighted : bool
        Whether weights came with the dispatch.
    """

    def __init__(self, owner: "Owner", slot: int, layout: str, views: Views, num_tokens: int, weighted: bool) -> None:
        self.layout, self.num_tokens, self.weighted = layout, num_tokens, weighted
        # Tensors of this result's own, of the same memory: programs may ask these for gradients.
        self.rows, self.scales = views.rows.detach(), None if views.scales is None else views.scales.detach()
        self.counts, self.offsets = views.counts, views.offsets
        self._owner, self._slot = owner, slot
        # How many tokens there are, on the device, where a combine has to be told: over hosts.
        self._num_tokens_there: torch.Tensor | None = None
        # By which call it has ended.
        self._ended: str | None = None

    def to_host(self) -> HostCounts:
        """The exact numbers, as Python's integers. Local; blocks the host until the current stream is over."""
        self._check_in_use("to_host")
        refuse_in_capture("received.to_host()")
        return HostCounts(self.counts.tolist(), self.offsets.tolist())

    def zero_padding(self) -> None:
        """Write zeros to the rows that the dispatch has not written, and to their scales. Local.

        Those are, in either layout, all but the ``counts`` rows of each expert from its offset on. For what reads whole
        rooms, or tiles that begin in an expert's rows and end after them; `combine` and `iris.ops.grouped_mm` need
        none of it. Enqueued on the current stream, without waiting; may be captured. The first call compiles.
        """
        self._check_in_use("zero_padding")
        self._owner.zero_padding(self)

    def release(self) -> None:
        """Give the memory back without a combine. Collective; enqueues a barrier of the ranks on the current stream.

        Raises
        ------
        ReceivedUsedUpError
            It was combined or released before.
        """
        self._check_in_use("release")
        self._owner.release(self)

    def _check_in_use(self, call: str) -> None:
        if self._ended is not None:
            raise ReceivedUsedUpError(call, self._ended)

    def __repr__(self) -> str:
        state = "in use" if self._ended is None else f"ended by {self._ended}"
        return f"<Received {self.layout} {list(self.rows.shape)} of {self.rows.dtype}, {state}>"
