"""A layer of experts whose results are known: tokens, choices and weights of every rank, and what must come of them.

Expert e makes ``x * factor(e) + shift(e)`` of a row. All are small whole numbers, and weights are eighths. So in
float32 every sum is exact, and results are those of one process in float64, bit by bit.
"""

import dataclasses

import pytest
import torch

from iris.experts import ExpertsConfig
from iris.language.target import architecture

E_EACH, H, M, K = 3, 20, 7, 3
# Of each choice of a token; the last one is none where a routing drops it.
ROUTINGS = ("random", "uneven", "to one expert", "to the last rank", "twice the same", "to nobody")
WEIGHTS = ("none", "dispatched", "combined")
# Kernels for few tokens are not for CDNA3.
FEW = pytest.param(
    True, marks=pytest.mark.skipif(torch.cuda.is_available() and architecture() == "gfx942", reason="not on CDNA3")
)
both_forms = pytest.mark.parametrize("low_latency", [False, FEW], ids=["many", "few"])


def digits(shape, seed, low, high):
    """Whole numbers from ``low`` to ``high``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high + 1, shape, generator=generator)


class Layer:
    """Of ``size`` ranks, with ``dtype`` rows of ``hidden`` elements."""

    def __init__(self, size, dtype, device, hidden=H, max_tokens=M):
        self.size, self.dtype, self.device = size, dtype, device
        self.senders = self.in_order(size)
        self.hidden, self.max_tokens, self.num_experts = hidden, max_tokens, E_EACH * size
        self.factors = digits((self.num_experts, hidden), 1, 1, 3).to(device)
        self.shifts = digits((self.num_experts, hidden), 2, -2, 2).to(device)

    @staticmethod
    def in_order(size):
        """Ranks, as rows of an expert follow each other."""
        return range(size)

    def tokens(self, round, rank):
        """How many a rank has: another number each time, at times none."""
        return (5 * round + 3 * rank + self.max_tokens) % (self.max_tokens + 1)

    def inputs(self, routing, round, rank):
        """``x``, ``topk_ids`` and ``topk_weights`` of a rank in a round."""
        tokens, seed = self.tokens(round, rank), 1000 * (round + 1) + rank
        x = digits((tokens, self.hidden), seed, -4, 4).to(self.dtype)
        weights = digits((tokens, K), seed + 100, 1, 8).float() / 8
        return x.to(self.device), self.route(routing, round, seed, tokens).to(self.device), weights.to(self.device)

    def route(self, routing, round, seed, tokens):
        scores = torch.rand(tokens, self.num_experts, generator=torch.Generator().manual_seed(seed))
        if routing == "uneven":
            scores -= torch.linspace(0, 1.5, self.num_experts)
        elif routing == "to the last rank":
            scores[:, -E_EACH:] += 1
        ids = scores.topk(K).indices
        if routing == "to one expert":
            ids[:, 0] = round % self.num_experts
            ids[:, 1:] = -1
        elif routing == "twice the same":
            ids[:, 2] = ids[:, 0]
        elif routing == "to nobody":
            ids.fill_(-1)
        if routing in ("random", "uneven"):
            # Of some tokens the second choice is dropped, of some all are.
            ids[::3, 1] = ids[1::5] = -1
        return ids

    def expected(self, routing, round, rank, weighted):
        """float64 ``[tokens, hidden]``."""
        x, ids, weights = self.inputs(routing, round, rank)
        x, there = x.double(), (ids >= 0).double()
        made = x[:, None, :] * self.factors[ids] + self.shifts[ids]
        return (made * (there * (weights.double() if weighted else 1))[:, :, None]).sum(dim=1)

    def rows(self, routing, round, expert):
        """The rows that an expert gets, in their order."""
        found = [self.inputs(routing, round, rank)[:2] for rank in self.senders]
        return torch.cat([x[(ids == expert).any(dim=1)] for x, ids in found])

    def through_experts(self, received, first):
        """What the experts of a rank, from ``first`` on, make of its rows; NaN where no row is. Waits for nothing."""
        rows = received.rows.flatten(0, -2)
        number = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
        expert = torch.searchsorted(received.offsets[1:].contiguous(), number, right=True).clamp(max=E_EACH - 1)
        there = number < received.offsets[:-1][expert] + received.counts[expert]
        made = rows.float() * self.factors[first + expert] + self.shifts[first + expert]
        return torch.where(there[:, None], made, torch.nan).to(rows.dtype).view(received.rows.shape)


def there(received):
    """Whether the dispatch has written a row, for each that there is room for."""
    number = torch.arange(received.rows.flatten(0, -2).shape[0], device=received.rows.device, dtype=torch.int32)
    ends = received.offsets[:-1] + received.counts
    found = (number[:, None] >= received.offsets[:-1]) & (number[:, None] < ends)
    return found.any(dim=1).view(received.rows.shape[:-1])


def experts(ctx, layer, config=None, group=None, low_latency=None):
    """``low_latency``: as of `ExpertsConfig`, in the place of what ``config`` has."""
    if low_latency is not None:
        config = dataclasses.replace(config or ExpertsConfig(), low_latency=low_latency)
    return ctx.experts(
        num_experts=layer.num_experts,
        hidden=layer.hidden,
        max_tokens=layer.max_tokens,
        top_k=K,
        dtype=layer.dtype,
        group=group,
        config=config,
    )


def done_with(ctx, ep):
    """When no rank uses it any more."""
    ctx.barrier()
    ep.close()
