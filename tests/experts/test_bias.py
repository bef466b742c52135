"""What combine adds to its result before it rounds it: a residual, or what a shared expert has made."""

import pytest
import torch

from experts.layers import Layer, both_forms, digits, done_with, experts
from iris.errors import InvalidExpertsError, NotATensorError, WrongDeviceError

F32, BF16 = torch.float32, torch.bfloat16
WAYS = ("apart", "in a tuple", "by columns", "the result itself", "apart")


def biases_of(layer, number, round, rank):
    tokens = layer.tokens(round, rank)
    return [digits((tokens, layer.hidden), 90 + 10 * each + round + rank, -9, 9) for each in range(number)]


def biased(ctx, low_latency, number):
    """Other data on each rank and in each round, given in another way; in one of them this rank has no bias."""
    layer = Layer(ctx.num_ranks, F32, ctx.device)
    ep = experts(ctx, layer, low_latency=low_latency)
    for round, way in enumerate(WAYS):
        x, ids, weights = layer.inputs("random", round, ctx.cur_rank)
        received = ep.dispatch(x, ids, weights)
        made = layer.through_experts(received, ep.first_expert)
        exact = layer.expected("random", round, ctx.cur_rank, True)
        if round == ctx.cur_rank + 1:
            assert torch.equal(ep.combine(made, received).double(), exact)
            continue
        given = [each.to(ctx.device, F32) for each in biases_of(layer, number, round, ctx.cur_rank)]
        exact = exact + sum(each.double() for each in given)
        if way == "by columns":
            given = [each.T.contiguous().T for each in given]
        bias = given[0] if number == 1 and way != "in a tuple" else tuple(given)
        out = given[-1] if way == "the result itself" else None
        found = ep.combine(made, received, out=out, bias=bias)
        assert torch.equal(found.double(), exact)
        assert out is None or found is out
    done_with(ctx, ep)


@pytest.mark.ranks(1, 2, 3)
@both_forms
@pytest.mark.parametrize("number", [1, 2])
def test_it_is_added(ranks, low_latency, number):
    ranks.run(biased, low_latency, number)


def rounded_once(ctx, low_latency):
    """After the sum of ranks, in the order in which they are given, in float32; and rounded once."""
    layer = Layer(ctx.num_ranks, BF16, ctx.device, hidden=64)
    ep = experts(ctx, layer, low_latency=low_latency)
    generator = torch.Generator().manual_seed(ctx.cur_rank)
    x, first, second = (torch.randn(5, layer.hidden, generator=generator).to(ctx.device, BF16) for _ in range(3))
    # Each token has one expert, on the next rank.
    ids = torch.full((5, 3), -1, device=ctx.device)
    ids[:, 0] = (ep.first_expert + 3) % layer.num_experts

    def sums(**given):
        received = ep.dispatch(x, ids)
        return ep.combine(received.rows.clone(), received, **given)

    expected = (x.float() + first.float() + second.float()).to(BF16)
    assert torch.equal(sums(bias=(first, second)), expected)
    assert torch.equal(sums(bias=first), (x.float() + first.float()).to(BF16))
    # 2^24 + 1 is no float32.
    large, one = torch.full_like(x, 2.0**24), torch.ones_like(x)
    x = large
    assert torch.equal(sums(bias=(-large, one)), one)
    assert torch.equal(sums(bias=(one, -large)), torch.zeros_like(x))
    done_with(ctx, ep)


@pytest.mark.ranks(2)
@both_forms
def test_it_is_rounded_once(ranks, low_latency):
    ranks.run(rounded_once, low_latency)


def refused(ctx, low_latency):
    layer = Layer(ctx.num_ranks, F32, ctx.device)
    ep = experts(ctx, layer, low_latency=low_latency)
    x, ids, _ = layer.inputs("random", 0, 0)  # whose sizes the errors name
    received = ep.dispatch(x, ids)
    memory = torch.zeros(x.numel() + 4, device=ctx.device)
    out, across = memory[: x.numel()].view(x.shape), memory[4:].view(x.shape)
    for error, words, given in (
        (InvalidExpertsError, r"bias of shape \[7, 20\] and torch.float32; it got \[6, 20\]", {"bias": x[1:]}),
        (InvalidExpertsError, "it got .* of torch.float16", {"bias": (x, x.half())}),
        (InvalidExpertsError, "a tensor, or a tuple of two, and got a tuple of 3", {"bias": (x, x, x)}),
        (InvalidExpertsError, "a tensor, or a tuple of two, and got a list of 2", {"bias": [x, x]}),
        (InvalidExpertsError, "a tensor, or a tuple of two, and got a float", {"bias": 1.0}),
        (NotATensorError, "combine.. takes tensors", {"bias": (x, None)}),
        (WrongDeviceError, "bias of combine.. is on meta", {"bias": x.to("meta")}),
        (InvalidExpertsError, "16 bytes before its bias .* 560 bytes each", {"out": out, "bias": (x, across)}),
        (InvalidExpertsError, "16 bytes after its bias", {"out": across, "bias": out}),
    ):
        with pytest.raises(error, match=words):
            ep.combine(received.rows, received, **given)
    ep.combine(received.rows, received, bias=x)
    done_with(ctx, ep)


@pytest.mark.ranks(1, 2)
@both_forms
def test_what_cannot_be_added_is_refused(ranks, low_latency):
    ranks.run(refused, low_latency)
