"""Few tokens: when they get kernels of their own; and a word of an old call is never taken for one of this call."""

import random

import pytest
import torch
from covering import thorough
from hesitation import hesitant

from experts.layers import FEW, Layer, done_with, experts
from iris.experts import ExpertsConfig
from iris.experts.kernel_arguments import FewTokens
from iris.experts.kernels import choose
from iris.experts.low_latency import memory
from iris.experts.memory import extents

# The number of the call before one that gives old words another stamp: `iris.experts.low_latency.memory`, "Stamps".
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
@pytest.mark.parametrize(("before", "released"), [thorough(BEFORE - 1, 3), (BEFORE, 1), (-3, 4)])
def test_old_words(ranks, low_latency, before, released):
    ranks.run(old_words, low_latency, before, released)


@pytest.mark.parametrize(
    ("ranks_of_it", "max_tokens", "low_latency", "few"),
    [
        (2, 512, None, True),
        (2, 513, None, False),
        (8, 128, None, True),
        (16, 1, None, False),
        (2, 1, False, False),
        pytest.param(2, 4096, True, True, marks=FEW.marks),
    ],
)
def test_which_kernels(monkeypatch, ranks_of_it, max_tokens, low_latency, few):
    monkeypatch.setattr(memory, "architecture", lambda: "simulator")
    sizes = extents(ranks_of_it, 32, 4, max_tokens, 256, torch.bfloat16, programs=8)
    chosen = choose(ExpertsConfig(low_latency=low_latency), sizes, torch.bfloat16)
    assert isinstance(chosen, FewTokens) == few
    monkeypatch.setattr(memory, "architecture", lambda: "gfx942")
    assert choose(ExpertsConfig(), sizes, torch.bfloat16) is sizes


@pytest.mark.parametrize(("max_tokens", "hidden", "split"), [(8, 7168, 8), (64, 7168, 2), (128, 7168, 1), (1, 272, 1)])
def test_programs_share_a_row(max_tokens, hidden, split):
    chosen = memory.few_tokens(extents(2, 256, 8, max_tokens, hidden, torch.bfloat16, programs=128), torch.bfloat16, 32)
    assert (chosen.SPLIT, chosen.PROGRAMS) == (split, split * max_tokens) and chosen.COLUMNS * split == hidden
