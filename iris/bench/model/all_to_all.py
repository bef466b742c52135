"""A mixture of experts by torch's all-to-all with exact counts, which the host has to know: for call by call.

A row travels for each choice of a token, there and back, as transformers and torchtitan have it.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from iris.bench.model.communication import ByTorch
from iris.bench.model.experts import Experts, inverse


class ByAllToAll(ByTorch):
    """`ByTorch`, but for mixtures of experts."""

    def mixture(self, rows: Tensor, experts: Experts) -> Tensor:
        ids, gates = experts.route(rows, self.group.rank() * len(rows))
        number, order = ids.flatten().sort(stable=True)
        counts = torch.bincount(number, minlength=self.num_ranks * experts.num_local)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        counts, theirs = (each.view(self.num_ranks, experts.num_local) for each in (counts, theirs))
        sent, got = torch.stack((counts.sum(1), theirs.sum(1))).tolist()
        of_choices = rows.index_select(0, order // experts.top_k)
        received = _Exchanged.apply(of_choices, sent, got, self.group)
        # They lie by rank, and by expert among those of a rank.
        expert = experts.local.repeat(self.num_ranks).repeat_interleave(theirs.flatten(), output_size=sum(got))
        by_expert = expert.argsort(stable=True)
        made = experts.multiply(received.index_select(0, by_expert), theirs.sum(0).cumsum(0).to(torch.int32))
        back = made.index_select(0, inverse(by_expert))
        return experts.add_up(_Exchanged.apply(back, got, sent, self.group), order, gates)


class _Exchanged(torch.autograd.Function):
    """Rows of which so many go to each rank, and so many come from each."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], got: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.got, ctx.group = sent, got, group
        return exchanged(rows, sent, got, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:  # type: ignore[override]
        return exchanged(gradient, ctx.got, ctx.sent, ctx.group), None, None, None


def exchanged(rows: Tensor, sent: list[int], got: list[int], group: dist.ProcessGroup) -> Tensor:
    received = rows.new_empty(sum(got), rows.shape[1])
    dist.all_to_all_single(received, rows.contiguous(), got, sent, group=group)
    return received
