"""Few tokens: a word of an old call is never taken for one of this call, however long ago that was."""

import random

import pytest
import torch
from hesitation import hesitant

from experts.layers import FEW, Layer, done_with, experts
from iris.experts import ExpertsConfig

# The number of the call before one that gives old words another stamp (`iris.experts.low_latency.memory`).
BEFORE = (1 << 16) - 1


def old_words(ctx, low_latency, before, released):
    """Words that look like those of a call to come, and have other weights; all calls up to then are released."""
    layer = Layer(ctx.num_ranks, torch.float32, ctx.device)
    ep = experts(ctx, layer, ExpertsConfig(in_flight=1), low_latency=low_latency)
    slot = ep._calls.open_memory().slots[0]
    ctx.barrier()
    slot.calls.fill_(before)
    last = before + released + 1
    for words in (slot.over, slot.given, slot.sent):
        words.fill_((last << 32) + 0x40000000)
    ctx.barrier()
    with hesitant(ctx, random.Random(ctx.cur_rank), chance=0.02):
        for round in range(released):
            ep.dispatch(*layer.inputs("random", round, ctx.cur_rank)[:2]).release()
        ctx.barrier()
        others = torch.arange(ctx.num_ranks, device=ctx.device) != ctx.cur_rank
        for words in (slot.over, slot.given):
            assert ((words[others] >> 32) != last).all()
        assert ((slot.sent >> 32) != last).all()
        ctx.barrier()
        for weighting in ("combined", "dispatched"):
            x, ids, weights = layer.inputs("random", released, ctx.cur_rank)
            received = ep.dispatch(x, ids, weights if weighting == "dispatched" else None)
            made = layer.through_experts(received, ep.first_expert)
            out = ep.combine(made, received, weights if weighting == "combined" else None)
            assert torch.equal(out.double(), layer.expected("random", released, ctx.cur_rank, True))
    done_with(ctx, ep)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("low_latency", [FEW])
# The number of a call is one of 32 bits, which becomes 0 once more.
@pytest.mark.parametrize(("before", "released"), [(BEFORE - 1, 3), (BEFORE, 1), (-3, 4)])
def test_old_words(ranks, low_latency, before, released):
    ranks.run(old_words, low_latency, before, released)
