"""The mixture of experts of a layer: its router, and what this rank's experts make of rows.

Each of W ranks has E / W experts, ``down(silu(gate(x)) * up(x))``. How tokens reach them is left to a `Communication`.

Which experts a token goes to is drawn beforehand, at random as a router of random weights would have it, by a large
bias of the router's logits. So no rounding changes a choice, and results can be compared with those of one process.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from iris.bench.model.dimensions import Dimensions, Share

# Tokens whose choices are drawn: of a call, on all ranks together, at most.
MOST_TOKENS = 1 << 15
# Between the logits of an expert and the one that a token would take before it: more than logits ever differ by.
FURTHER = 100.0


class ExpertWeights(NamedTuple):
    """A rank's part. ``router``: ``[hidden, E]``. ``experts_up``: gates first, ``[E / W, 2 I, hidden]``.
    ``experts_down``: ``[E / W, hidden, I]``. ``preferences``: float32 ``[MOST_TOKENS, E]``, of `draw_preferences`."""

    router: Tensor
    experts_up: Tensor
    experts_down: Tensor
    preferences: Tensor


def draw_preferences(experts: int, generator: torch.Generator) -> Tensor:
    """What is added to logits, float32 ``[MOST_TOKENS, E]``: all experts, in an order of each token's own."""
    chances = torch.rand(MOST_TOKENS, experts, generator=generator, device=generator.device)
    return FURTHER * chances.argsort(1).to(torch.float32)


class Experts(torch.nn.Module):
    """Those of a rank, and the router, which all ranks have."""

    router: Tensor
    experts_up: Tensor
    experts_down: Tensor
    preferences: Tensor
    local: Tensor

    def __init__(self, dimensions: Dimensions, weights: ExpertWeights, share: Share) -> None:
        super().__init__()
        self.top_k = dimensions.top_k
        self.num_local = dimensions.experts // share.num_ranks
        self.num_experts, self.first_expert = dimensions.experts, share.rank * self.num_local
        for name in ("router", "experts_up", "experts_down"):
            self.register_parameter(name, torch.nn.Parameter(getattr(weights, name), requires_grad=False))
        self.register_buffer("preferences", weights.preferences, persistent=False)
        local = torch.arange(self.num_local, device=weights.router.device)
        self.register_buffer("local", local, persistent=False)

    def route(self, rows: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """The experts of tokens, int64 ``[M, K]``, and their weights in the sums, float32 or wider ``[M, K]``.

        ``first``: the number of the first row among the rows of all ranks, by which its choices are drawn.
        """
        logits = rows @ self.router
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        ids = (logits.detach() + self.preferences[first : first + len(rows)]).topk(self.top_k).indices
        return ids, logits.gather(1, ids).softmax(1)

    def of_local_experts(self, rows: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        """The sums over those of a token's experts that are here: ``[M, hidden]`` → ``[M, hidden]``.

        The host knows no count: there is room for all choices, and those of other ranks' experts come after all others.
        """
        # Counted from the first one that is here, round to those before it.
        expert, order = ((ids.flatten() - self.first_expert) % self.num_experts).sort(stable=True)
        ends = torch.searchsorted(expert, self.local, right=True, out_int32=True)
        here = (expert < self.num_local)[:, None]
        of_choices = rows.index_select(0, order // self.top_k)
        # Products leave out those last rows, forward and backward, so that there may be anything in them.
        if of_choices.requires_grad:
            of_choices = torch.where(here, of_choices, 0)
        return self.add_up(torch.where(here, self.multiply(of_choices, ends), 0), order, gates)

    def multiply(self, rows: Tensor, ends: Tensor) -> Tensor:
        """What experts make of their rows, ``[R, hidden]`` each, which end where ``ends``, int32 ``[E / W]``, says."""
        up, down = self.experts_up.transpose(1, 2), self.experts_down.transpose(1, 2)
        if has_grouped_products(rows):
            grouped_mm = torch.nn.functional.grouped_mm
            return grouped_mm(swiglu(grouped_mm(rows, up, offs=ends)), down, offs=ends)
        begin, found = 0, []
        for expert, end in enumerate(ends.tolist()):
            found.append(swiglu(rows[begin:end] @ up[expert]) @ down[expert])
            begin = end
        return torch.cat((*found, rows.new_zeros(len(rows) - begin, rows.shape[1])))

    def add_up(self, y: Tensor, order: Tensor, gates: Tensor) -> Tensor:
        """``[M * K, hidden]`` of choices, in the order of ``order``, times their weights: sums over tokens' choices."""
        of_choices = y.index_select(0, inverse(order)).view(*gates.shape, -1)
        return (of_choices * gates.to(y.dtype)[..., None]).sum(1)


def swiglu(inside: Tensor) -> Tensor:
    """Of ``[M, 2 N]``, gates first: ``[M, N]``."""
    gate, up = inside.chunk(2, 1)
    return silu(gate) * up


def inverse(order: Tensor) -> Tensor:
    """Where each place is in a permutation, int64 ``[N]``."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def has_grouped_products(rows: Tensor) -> bool:
    """Whether torch multiplies groups of such rows without the host: from 2.10 on, in the type that it compiles."""
    return rows.dtype is torch.bfloat16 and hasattr(torch.nn.functional, "grouped_mm")
