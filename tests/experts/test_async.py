"""Dispatch and combine in two halves: what sends at once, what receives when a program waits for it."""

import random
from unittest import mock

import pytest
import torch
from covering import thorough
from hesitation import hesitant

from experts.layers import WEIGHTS, Layer, both_forms, done_with, experts
from iris.errors import HeapClosedError, PendingCallError, ReceivedUsedUpError, TooManyInFlightError
from iris.experts import ExpertsConfig
from iris.experts.calls import Calls

F32, BF16 = torch.float32, torch.bfloat16


def micro_batches(ctx, low_latency, weighting, max_tokens):
    """Two take turns: while one is on its way, the other's experts compute. Others call without halves in between."""
    layer = Layer(ctx.num_ranks, F32, ctx.device, max_tokens=max_tokens)
    ep = experts(ctx, layer, ExpertsConfig(in_flight=3, num_sms=2), low_latency=low_latency)
    given = {round: layer.inputs("random", round, ctx.cur_rank) for round in range(6)}

    def dispatch(round, **how):
        x, ids, weights = given[round]
        return ep.dispatch(x, ids, weights if weighting == "dispatched" else None, layout="compact", **how)

    def combine(round, received, **how):
        made, weights = layer.through_experts(received, ep.first_expert), given[round][2]
        return ep.combine(made, received, weights if weighting == "combined" else None, **how)

    def check(round, out):
        assert torch.equal(out.double(), layer.expected("random", round, ctx.cur_rank, weighting != "none"))

    with hesitant(ctx, random.Random(ctx.cur_rank), chance=0.01):
        for round in (0, 3):
            first, second = (dispatch(round + each, async_op=True) for each in range(2))
            received = first.wait()
            check(round + 2, combine(round + 2, dispatch(round + 2)))
            back = combine(round, received, async_op=True)
            others = combine(round + 1, second.wait(), async_op=True)
            # In another order than they were sent.
            check(round + 1, others.wait())
            check(round, back.wait())
    done_with(ctx, ep)


@pytest.mark.ranks(1, 2, 3)
@both_forms
@pytest.mark.parametrize("weighting", WEIGHTS)
@pytest.mark.parametrize("max_tokens", [2, thorough(7)])
def test_micro_batches(ranks, low_latency, weighting, max_tokens):
    ranks.run(micro_batches, low_latency, weighting, max_tokens)


def same_bits(ctx, low_latency, quantize):
    """As in one launch, of numbers that are rounded on the way; with a bias, and released without a combine, too."""
    layer = Layer(ctx.num_ranks, BF16, ctx.device, hidden=256)
    ep = experts(ctx, layer, low_latency=low_latency)
    generator = torch.Generator().manual_seed(ctx.cur_rank)
    x, bias = (torch.randn(6, layer.hidden, generator=generator).to(ctx.device, BF16) for _ in range(2))
    weights = torch.rand(6, 3, generator=generator).to(ctx.device)
    ids = layer.route("random", 0, ctx.cur_rank, 6).to(ctx.device)
    found = []
    for halves in (False, True, False, True):
        received = ep.dispatch(x, ids, weights, quantize=quantize, async_op=halves)
        received = received.wait() if halves else received
        received.zero_padding()
        rows = received.rows.float()
        if quantize is not None:
            rows = rows * received.scales.repeat_interleave(128, dim=-1)
        out = ep.combine(rows.to(BF16), received, bias=bias, async_op=halves)
        found.append((received.counts.clone(), rows, out.wait() if halves else out))
        ep.dispatch(x, ids, async_op=True).wait().release()
    assert found[0][1].any()
    for later in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], later, strict=True))
    done_with(ctx, ep)


@pytest.mark.ranks(2)
@both_forms
@pytest.mark.parametrize("quantize", [None, "fp8_block128"])
def test_the_same_bits_as_in_one_launch(ranks, low_latency, quantize):
    ranks.run(same_bits, low_latency, quantize)


def misuse(ctx, low_latency):
    layer = Layer(1, F32, ctx.device)
    ep = experts(ctx, layer, low_latency=low_latency)
    x, ids, _ = layer.inputs("random", 0, 0)
    first, second = ep.dispatch(x, ids, async_op=True), ep.dispatch(x, ids, async_op=True)
    with pytest.raises(
        TooManyInFlightError, match=r"2 results .*wait\(\) of dispatch\(\) in slot 0 and dispatch\(\) in"
    ):
        ep.dispatch(x, ids)
    received = first.wait()
    with pytest.raises(PendingCallError, match=r"wait\(\) of a dispatch\(\) in slot 0 is called a second time"):
        first.wait()
    # A wait in another capture of a graph than the call, or in none, leaves it to be waited for.
    with mock.patch.object(Calls, "_capture", return_value=1):
        back = ep.combine(received.rows, received, async_op=True)
    with pytest.raises(PendingCallError, match=r"one half of combine\(\) in slot 0"):
        back.wait()
    with mock.patch.object(Calls, "_capture", return_value=2), pytest.raises(PendingCallError, match="one half of"):
        back.wait()
    with pytest.raises(ReceivedUsedUpError, match=r"combine\(\) has ended"):
        ep.combine(received.rows, received)
    # Its memory is in use until it has come back.
    with pytest.raises(TooManyInFlightError, match=r"combine\(\) in slot 0"):
        ep.dispatch(x, ids)
    with pytest.raises(
        PendingCallError, match=r"close\(\) comes before wait\(\) of dispatch\(\) in slot 1 and combine"
    ):
        ep.close()
    with mock.patch.object(Calls, "_capture", return_value=1):
        back.wait()
    with pytest.raises(PendingCallError, match="second time"):
        back.wait()
    ep.combine(second.wait().rows, ep.dispatch(x, ids))
    # What the context closes, as at its end, is not waited for any more.
    third = experts(ctx, layer, low_latency=low_latency)
    pending = third.dispatch(x, ids, async_op=True)
    third._close()
    with pytest.raises(HeapClosedError, match="Make another one"):
        pending.wait()
    assert "to be waited for" in repr(pending) and "was waited for" in repr(back)
    ep.close()


@pytest.mark.ranks(1, exactly=True)
@both_forms
def test_misuse(ranks, low_latency):
    ranks.run(misuse, low_latency)


def in_a_graph(ctx, low_latency):
    """Both halves of both calls, those of the combine on two streams; other data in each replay."""
    layer = Layer(ctx.num_ranks, F32, ctx.device)
    ep = experts(ctx, layer, low_latency=low_latency)
    x, ids, weights = (torch.zeros_like(each) for each in layer.inputs("random", 0, ctx.cur_rank))
    x, ids, weights = (each.new_zeros(layer.max_tokens, each.shape[1]) for each in (x, ids, weights))
    graph, side, out = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.empty_like(x)
    with torch.cuda.graph(graph):
        received = ep.dispatch(x, ids, weights, async_op=True).wait()
        pending = ep.combine(layer.through_experts(received, ep.first_expert), received, out=out, async_op=True)
        with torch.cuda.stream(side):
            pending.wait()
        torch.cuda.current_stream().wait_stream(side)
    wrong = torch.zeros((), dtype=torch.int64, device=ctx.device)
    for round in range(200):
        if round % 40 == ctx.cur_rank:
            torch.cuda._sleep(2_000_000)
        tokens = layer.tokens(round, ctx.cur_rank)
        ids.fill_(-1)
        for whole, part in zip((x, ids, weights), layer.inputs("random", round, ctx.cur_rank), strict=True):
            whole[:tokens] = part
        graph.replay()
        wrong += (out[:tokens] != layer.expected("random", round, ctx.cur_rank, True)).sum()
    assert wrong.item() == 0
    pending = ep.dispatch(x, ids, async_op=True)
    with pytest.raises(PendingCallError, match="one half of dispatch"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        pending.wait()
    # Of two that run at once, the one that is waited for second goes to another stream.
    first, second = pending, ep.dispatch(x, ids, weights, async_op=True)
    first.wait().release()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        received = second.wait()
        out = ep.combine(layer.through_experts(received, ep.first_expert), received)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(out[:tokens].double(), layer.expected("random", round, ctx.cur_rank, True))
    done_with(ctx, ep)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are for GPUs")
@both_forms
def test_replays(ranks, low_latency):
    ranks.run(in_a_graph, low_latency)
