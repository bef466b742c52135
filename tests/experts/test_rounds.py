"""Round after round without a meeting of hosts: other data each time, ranks that come late, several in flight."""

import functools
import random

import pytest
import torch
from covering import EVERYTHING, SAMPLED
from hesitation import hesitant

from experts.layers import FEW, ROUTINGS, Layer, both_forms, done_with, experts
from iris.experts import ExpertsConfig

F32, BF16 = torch.float32, torch.bfloat16
LATE = 2_000_000  # cycles: about a millisecond
BUSY = ROUTINGS[:-1]
# Of so many rounds data is drawn; later rounds have these again, in other orders. A prime.
DRAWN = 199
# Of each of these: drawn, since the numbers of tokens follow a rule (`test_every_routing_meets_all_numbers_of_tokens`).
ROUTING = random.Random(1).choices(ROUTINGS, k=DRAWN)


def data_of(round):
    """Whose data a round has: any four rounds that follow each other have different data.

    Each time through, the step is larger by one, and with `DRAWN` a prime none comes twice before all came.
    """
    return round * (1 + round // DRAWN) % DRAWN


def rounds(ctx, low_latency, max_tokens, hidden):
    """Three in flight, which end in another order than they began."""
    on_gpu = ctx.device.type == "cuda"
    layer = Layer(ctx.num_ranks, F32, ctx.device, hidden=hidden, max_tokens=max_tokens)
    programs = 2 if max_tokens > 2 and not on_gpu else None
    ep = experts(ctx, layer, ExpertsConfig(in_flight=3, num_sms=programs), low_latency=low_latency)
    # The same on all ranks: which weights, which layout, and who ends next.
    chosen = random.Random(3)
    wrong = torch.zeros((), dtype=torch.int64, device=ctx.device)
    open_rounds = []

    # Once it is drawn, a rank may be as many rounds ahead as its stream takes: nothing waits for the host.
    @functools.cache
    def inputs(number):
        return layer.inputs(ROUTING[number], number, ctx.cur_rank)

    @functools.cache
    def expected(number, weighted):
        return layer.expected(ROUTING[number], number, ctx.cur_rank, weighted)

    def finish():
        number, weighting, received = open_rounds.pop(chosen.randrange(len(open_rounds)))
        if weighting == "released":
            received.release()
            return
        _, _, weights = inputs(number)
        made = layer.through_experts(received, ep.first_expert)
        out = ep.combine(made, received, weights if weighting == "combined" else None)
        nonlocal wrong
        wrong += (out != expected(number, weighting != "none")).sum()

    with hesitant(ctx, random.Random(ctx.cur_rank), chance=0.01):
        for round in range(5000 if on_gpu else 7 if SAMPLED else 12):
            if on_gpu and round % 40 == ctx.cur_rank:
                torch.cuda._sleep(LATE)
            number, weighting = data_of(round), chosen.choice(("none", "dispatched", "combined", "released"))
            x, ids, weights = inputs(number)
            layout = chosen.choice(("expanded", "compact"))
            received = ep.dispatch(x, ids, weights if weighting == "dispatched" else None, layout=layout)
            open_rounds.append((number, weighting, received))
            while len(open_rounds) == 3 or (open_rounds and chosen.random() < 0.3):
                finish()
        while open_rounds:
            finish()
    assert wrong.item() == 0
    done_with(ctx, ep)


@pytest.mark.ranks(*((1, 2, 3, 4, 8) if EVERYTHING else (2, 3)))
@both_forms
@pytest.mark.parametrize(("max_tokens", "hidden"), [(7, 20), (2, 256)])
def test_rounds(ranks, low_latency, max_tokens, hidden):
    ranks.run(rounds, low_latency, max_tokens, hidden)


@pytest.mark.parametrize("max_tokens", [7, 2])
def test_every_routing_meets_all_numbers_of_tokens(max_tokens):
    layer = Layer(2, F32, torch.device("cpu"), max_tokens=max_tokens)
    for rank in range(2):
        met = {(routing, layer.tokens(number, rank)) for number, routing in enumerate(ROUTING)}
        assert len(met) == len(ROUTINGS) * (max_tokens + 1)


def twice(ctx, low_latency):
    """With weights and rows of which sums are rounded."""
    layer = Layer(ctx.num_ranks, BF16, ctx.device)
    ep = experts(ctx, layer, low_latency=low_latency)
    found = []
    generator = torch.Generator().manual_seed(ctx.cur_rank)
    x = torch.randn(6, layer.hidden, generator=generator).to(ctx.device, BF16)
    weights = torch.rand(6, 3, generator=generator).to(ctx.device)
    ids = layer.route("random", 0, ctx.cur_rank, 6).to(ctx.device)
    for run in range(3):
        with hesitant(ctx, random.Random(10 * run + ctx.cur_rank), chance=0.02):
            received = ep.dispatch(x, ids, weights)
            rows = received.rows.clone()
            there = torch.arange(ep.capacity, device=ctx.device)[None, :, None] < received.counts[:, None, None]
            found.append((torch.where(there, rows, 0), ep.combine(rows, received)))
    assert all(torch.equal(one, other) for later in found[1:] for one, other in zip(found[0], later, strict=True))
    done_with(ctx, ep)


@pytest.mark.thorough
@pytest.mark.ranks(3 if EVERYTHING else 2)
@pytest.mark.parametrize("low_latency", [False, FEW], ids=["many", "few"])
def test_the_same_bits_in_every_run(ranks, low_latency):
    ranks.run(twice, low_latency)


def replay(ctx, low_latency):
    """A graph of a first call, whose tokens, choices and weights are others in each replay."""
    layer = Layer(ctx.num_ranks, F32, ctx.device)
    ep = experts(ctx, layer, low_latency=low_latency)
    data = [torch.zeros_like(each) for each in layer.inputs("random", 0, ctx.cur_rank)]
    # As many as there may be: those that a round has not got have no experts.
    x, ids, weights = (each.new_zeros(layer.max_tokens, each.shape[1]) for each in data)
    out = torch.empty_like(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        received = ep.dispatch(x, ids, weights)
        ep.combine(layer.through_experts(received, ep.first_expert), received, out=out)
    wrong = torch.zeros((), dtype=torch.int64, device=ctx.device)
    for round in range(200):
        if round % 40 == ctx.cur_rank:
            torch.cuda._sleep(LATE)
        routing, tokens = BUSY[round % len(BUSY)], layer.tokens(round, ctx.cur_rank)
        ids.fill_(-1)
        for whole, part in zip((x, ids, weights), layer.inputs(routing, round, ctx.cur_rank), strict=True):
            whole[:tokens] = part
        graph.replay()
        wrong += (out[:tokens] != layer.expected(routing, round, ctx.cur_rank, True)).sum()
        wrong += (out[tokens:] != 0).sum()
    assert wrong.item() == 0
    # Eager calls may follow.
    x, ids, weights = layer.inputs("random", 1, ctx.cur_rank)
    received = ep.dispatch(x, ids, weights)
    out = ep.combine(layer.through_experts(received, ep.first_expert), received)
    assert torch.equal(out.double(), layer.expected("random", 1, ctx.cur_rank, True))
    done_with(ctx, ep)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are for GPUs")
@both_forms
def test_replays_of_a_first_call(ranks, low_latency):
    ranks.run(replay, low_latency)


def ahead(ctx, low_latency):
    """A rank without tokens waits for nothing but that its memory may be written again; the others take their time."""
    layer = Layer(ctx.num_ranks, F32, ctx.device)
    ep = experts(ctx, layer, ExpertsConfig(in_flight=1), low_latency=low_latency)
    wrong = torch.zeros((), dtype=torch.int64, device=ctx.device)
    with hesitant(ctx, random.Random(ctx.cur_rank), chance=0.1 if ctx.cur_rank else 0):
        for round in range(200 if ctx.device.type == "cuda" else 5):
            x, ids, weights = layer.inputs("random", round, ctx.cur_rank)
            if ctx.cur_rank == 0:
                x, ids, weights = x[:0], ids[:0], weights[:0]
            elif ctx.device.type == "cuda":
                torch.cuda._sleep(LATE // 20)
            received = ep.dispatch(x, ids, weights)
            out = ep.combine(layer.through_experts(received, ep.first_expert), received)
            wrong += (out != layer.expected("random", round, ctx.cur_rank, True)[: len(x)]).sum()
    assert wrong.item() == 0
    done_with(ctx, ep)


@pytest.mark.ranks(*((2, 3) if EVERYTHING else (2,)))
@both_forms
def test_a_rank_that_is_ahead(ranks, low_latency):
    ranks.run(ahead, low_latency)
