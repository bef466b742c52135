"""Rows that a dispatch has not written are zeros on demand, and the others stay as they are."""

import pytest
import torch

from experts.layers import ROUTINGS, Layer, both_forms, done_with, experts, there
from iris.experts import ExpertsConfig

F32, BF16 = torch.float32, torch.bfloat16


def padded(ctx, low_latency, layout, dtype, quantize, hidden):
    layer = Layer(ctx.num_ranks, dtype, ctx.device, hidden=hidden)
    ep = experts(ctx, layer, ExpertsConfig(layouts=(layout,), alignment=4), low_latency=low_latency)
    for round, routing in enumerate(ROUTINGS):
        x, ids, weights = layer.inputs(routing, round, ctx.cur_rank)
        received = ep.dispatch(x, ids, weights, quantize=quantize, layout=layout)
        written = there(received)
        before = []
        for tensor in (received.rows, received.scales):
            if tensor is not None:
                # Bits of all kinds where nobody has written.
                memory = tensor.view(torch.uint8)
                memory[~written] = 201
                before.append((memory, memory.clone()))
        received.zero_padding()
        for memory, was in before:
            assert torch.equal(memory, torch.where(written[..., None], was, 0))
        ep.combine(torch.zeros(received.rows.shape, dtype=dtype, device=ctx.device), received)
    done_with(ctx, ep)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("layout", ["expanded", "compact"])
@pytest.mark.parametrize(
    ("dtype", "quantize", "hidden"),
    # Wider than what a program stores at a time, too.
    [(F32, None, 4099), (BF16, None, 17), (BF16, "fp8_row", 32), (BF16, "fp8_block128", 272)],
)
@both_forms
def test_padding(ranks, low_latency, layout, dtype, quantize, hidden):
    ranks.run(padded, low_latency, layout, dtype, quantize, hidden)


def replayed(ctx):
    """A graph of a first call, whose counts are others in each replay."""
    layer = Layer(ctx.num_ranks, F32, ctx.device)
    ep = experts(ctx, layer)
    x = torch.ones(layer.max_tokens, layer.hidden, device=ctx.device)
    ids = torch.zeros(layer.max_tokens, 3, dtype=torch.int64, device=ctx.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        received = ep.dispatch(x, ids)
        received.zero_padding()
        rows, written = received.rows.clone(), there(received)
        received.rows.fill_(torch.nan)
        ep.combine(torch.zeros_like(rows), received)
    for round in range(20):
        ids.fill_(-1)
        tokens = layer.tokens(round, ctx.cur_rank)
        ids[:tokens] = layer.inputs("random", round, ctx.cur_rank)[1]
        graph.replay()
        assert torch.equal(rows, written[..., None].expand_as(rows).float())
    done_with(ctx, ep)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are for GPUs")
def test_padding_in_a_graph(ranks):
    ranks.run(replayed)
