"""How many tokens there are may be known on the device alone, as in a graph, whose replays have different numbers."""

import pytest
import torch

from experts.layers import E_EACH, WEIGHTS, Layer, both_forms, done_with, experts
from iris.errors import InvalidExpertsError, NotATensorError, WrongDeviceError

F32 = torch.float32
# What lies where no token is.
NOWHERE = -77.0
# In the later ones a rank has no tokens, each another one.
ROUNDS = (0, 5, 6, 7)


class Whole:
    """Tensors with room for all tokens, of which a round has some; after these are numbers that nobody may use."""

    def __init__(self, layer):
        x, ids, weights = layer.inputs("random", 0, 0)
        self.x, self.ids, self.weights = (each.new_zeros(layer.max_tokens, each.shape[1]) for each in (x, ids, weights))
        self.count = torch.zeros(1, dtype=torch.int32, device=layer.device)
        self.out = torch.empty_like(self.x)

    def fill(self, layer, round, rank, count=None):
        """``count``: what is said of the number, by default the number."""
        tokens = layer.tokens(round, rank)
        self.x.fill_(torch.nan)
        self.ids.fill_(layer.num_experts - 1)
        self.weights.fill_(torch.nan)
        for whole, part in zip((self.x, self.ids, self.weights), layer.inputs("random", round, rank), strict=True):
            whole[:tokens] = part
        self.count.fill_(tokens if count is None else count)
        self.out.fill_(NOWHERE)


def counted(ctx, low_latency, weighting, async_op):
    layer = Layer(ctx.num_ranks, F32, ctx.device)
    ep, whole = experts(ctx, layer, low_latency=low_latency), Whole(layer)
    for number, round in enumerate(ROUNDS):
        whole.fill(layer, round, ctx.cur_rank)
        # It is local: in each round another rank of several says it on the host.
        says = None if number % max(2, ctx.num_ranks) == ctx.cur_rank else whole.count
        tokens = layer.tokens(round, ctx.cur_rank)
        x, ids, weights = (each if says is not None else each[:tokens] for each in (whole.x, whole.ids, whole.weights))
        out = whole.out if says is not None else whole.out[:tokens]
        received = ep.dispatch(
            x, ids, weights if weighting == "dispatched" else None, num_tokens=says, layout="compact", async_op=async_op
        )
        received = received.wait() if async_op else received
        assert received.num_tokens == len(x)
        for local in range(E_EACH):
            wanted = layer.rows("random", round, ep.first_expert + local)
            begin, count = received.offsets[local].item(), received.counts[local].item()
            assert count == len(wanted) and torch.equal(received.rows[begin : begin + count], wanted)
        made = layer.through_experts(received, ep.first_expert)
        back = ep.combine(made, received, weights if weighting == "combined" else None, out=out, async_op=async_op)
        assert (back.wait() if async_op else back) is out
        exact = layer.expected("random", round, ctx.cur_rank, weighting != "none")
        assert torch.equal(out[:tokens].double(), exact)
        assert (whole.out[tokens:] == NOWHERE).all()
    done_with(ctx, ep)


@pytest.mark.ranks(1, 2, 3)
@both_forms
@pytest.mark.parametrize("weighting", WEIGHTS)
@pytest.mark.parametrize("async_op", [False, True])
def test_as_many_as_there_are(ranks, low_latency, weighting, async_op):
    ranks.run(counted, low_latency, weighting, async_op)


def limits(ctx, low_latency):
    """A number that is too large, or less than none, is taken for the nearest that can be."""
    layer = Layer(1, F32, ctx.device)
    ep, x = experts(ctx, layer, low_latency=low_latency), torch.ones(4, 20, device=ctx.device)
    ids = torch.tensor([[0, 1, -1]] * 4, device=ctx.device)
    for said, tokens in ((9, 4), (-3, 0), (2, 2)):
        received = ep.dispatch(x, ids, num_tokens=torch.tensor([said], dtype=torch.int32, device=ctx.device))
        assert received.counts.tolist() == [tokens, tokens, 0]
        out = ep.combine(received.rows.clone(), received, out=torch.full_like(x, NOWHERE))
        assert (out[:tokens] == 2).all() and (out[tokens:] == NOWHERE).all()
    one = torch.ones(1, dtype=torch.int32, device=ctx.device)
    for error, words, given in (
        (NotATensorError, "takes tensors", 3),
        (InvalidExpertsError, r"num_tokens of shape \[1\] and torch.int32; it got \[1\] of torch.int64", one.long()),
        (InvalidExpertsError, r"it got \[2\] of", torch.cat([one, one])),
        (WrongDeviceError, "num_tokens of dispatch.. is on meta", one.to("meta")),
    ):
        with pytest.raises(error, match=words):
            ep.dispatch(x, ids, num_tokens=given)
    ep.dispatch(x, ids, num_tokens=one).release()
    ep.close()


@pytest.mark.ranks(1, exactly=True)
@both_forms
def test_limits(ranks, low_latency):
    ranks.run(limits, low_latency)


def replay(ctx, low_latency):
    layer = Layer(ctx.num_ranks, F32, ctx.device)
    ep, whole = experts(ctx, layer, low_latency=low_latency), Whole(layer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        received = ep.dispatch(whole.x, whole.ids, whole.weights, num_tokens=whole.count)
        ep.combine(layer.through_experts(received, ep.first_expert), received, out=whole.out)
    wrong = torch.zeros((), dtype=torch.int64, device=ctx.device)
    for round in range(200):
        whole.fill(layer, round, ctx.cur_rank)
        graph.replay()
        tokens = layer.tokens(round, ctx.cur_rank)
        wrong += (whole.out[:tokens] != layer.expected("random", round, ctx.cur_rank, True)).sum()
        wrong += (whole.out[tokens:] != NOWHERE).sum()
    assert wrong.item() == 0
    done_with(ctx, ep)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are for GPUs")
@both_forms
def test_replays(ranks, low_latency):
    ranks.run(replay, low_latency)
