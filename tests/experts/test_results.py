"""Dispatch and combine give what one process with all experts would, whatever the routing."""

import random
from itertools import cycle
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from covering import EVERYTHING, thorough

from experts.layers import E_EACH, ROUTINGS, WEIGHTS, Layer, both_forms, done_with, experts
from iris.experts import ExpertsConfig, memory
from iris.simulator import grid

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
LAYOUTS = ("expanded", "compact")
TYPES = ((F32, torch.int64), (BF16, torch.int32), (F16, torch.int64))
ROUNDS = 3


def call(layer, ep, routing, round, rank, weighting="dispatched", layout="expanded", ids=torch.int64):
    """Dispatch, experts and combine of one round; what was received, and what came back."""
    x, topk_ids, weights = layer.inputs(routing, round, rank)
    received = ep.dispatch(x, topk_ids.to(ids), weights if weighting == "dispatched" else None, layout=layout)
    made = layer.through_experts(received, ep.first_expert)
    return received, made, ep.combine(made, received, weights if weighting == "combined" else None)


def compare(layer, out, routing, round, rank, weighting):
    exact = layer.expected(routing, round, rank, weighting != "none")
    assert out.dtype == layer.dtype
    if layer.dtype == F32:
        assert torch.equal(out.double(), exact)
    else:
        # Rounded once for each rank of experts, and once at the end.
        step = torch.finfo(layer.dtype).eps
        torch.testing.assert_close(out.double(), exact, rtol=step, atol=60 * step)


def results(ctx, low_latency, routing, weighting, layout, dtype, ids):
    layer = Layer(ctx.num_ranks, dtype, ctx.device)
    config = ExpertsConfig(layouts=(layout,), alignment=4)
    ep = experts(ctx, layer, config, low_latency=low_latency)
    for round in range(ROUNDS):
        received, _, out = call(layer, ep, routing, round, ctx.cur_rank, weighting, layout, ids)
        rows, first = received.rows.flatten(0, -2), 0
        for local in range(E_EACH):
            wanted = layer.rows(routing, round, ep.first_expert + local)
            begin, count = received.offsets[local].item(), received.counts[local].item()
            assert begin == first and count == len(wanted)
            assert torch.equal(rows[begin : begin + count], wanted)
            first += ep.capacity if layout == "expanded" else -(-count // 4) * 4
        assert received.offsets[E_EACH].item() == first
        compare(layer, out, routing, round, ctx.cur_rank, weighting)
    done_with(ctx, ep)


@pytest.mark.ranks(*((1, 2, 3, 4) if EVERYTHING else (1, 3)))
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("weighting", WEIGHTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "ids"), TYPES)
@both_forms
def test_results(ranks, low_latency, routing, weighting, layout, dtype, ids):
    ranks.run(results, low_latency, routing, weighting, layout, dtype, ids)


# Each value, but not all combinations, which take too long on so many ranks.
@pytest.mark.thorough
@pytest.mark.ranks(8, exactly=True)
@pytest.mark.parametrize(
    ("routing", "weighting", "layout", "types"), list(zip(ROUTINGS, cycle(WEIGHTS), cycle(LAYOUTS), cycle(TYPES)))
)
@both_forms
def test_eight_ranks(ranks, low_latency, routing, weighting, layout, types):
    ranks.run(results, low_latency, routing, weighting, layout, *types)


def many_tokens(ctx, low_latency):
    """Of which a program serves more than it moves together, so that it goes through several steps, at any time."""
    layer = Layer(ctx.num_ranks, F32, ctx.device, max_tokens=45)
    ep = experts(ctx, layer, ExpertsConfig(num_sms=2), low_latency=low_latency)
    # In the simulator it is left to chance which program goes on.
    with mock.patch.object(grid, "chance", random.Random(ctx.cur_rank)):
        for round in (0, 8):
            for layout, weighting in (("expanded", "dispatched"), ("compact", "combined")):
                _, _, out = call(layer, ep, "random", round, ctx.cur_rank, weighting, layout)
                compare(layer, out, "random", round, ctx.cur_rank, weighting)
    done_with(ctx, ep)


@pytest.mark.thorough
@pytest.mark.ranks(*((1, 2, 3) if EVERYTHING else (2,)))
@both_forms
def test_many_tokens(ranks, low_latency):
    ranks.run(many_tokens, low_latency)


def wide_rows(ctx, low_latency, hidden, max_tokens):
    """Rows that a program moves in several parts, or that programs share; tensors that begin anywhere, in any order."""
    layer = Layer(ctx.num_ranks, F32, ctx.device, hidden=hidden, max_tokens=max_tokens)
    ep = experts(ctx, layer, low_latency=low_latency)
    for offset in (0, 1):
        x, ids, weights = layer.inputs("random", 0, ctx.cur_rank)
        shifted = torch.empty(x.numel() + 1, device=ctx.device)[offset:][: x.numel()].view(x.shape).copy_(x)
        received = ep.dispatch(shifted, ids.T.contiguous().T, weights.T.contiguous().T)
        out = ep.combine(layer.through_experts(received, ep.first_expert), received)
        compare(layer, out, "random", 0, ctx.cur_rank, "dispatched")
    done_with(ctx, ep)


@pytest.mark.ranks(2)
@both_forms
@pytest.mark.parametrize(("hidden", "max_tokens"), [thorough(4099, 3), (1024, 1), (768, 2)])
def test_wide_rows(ranks, low_latency, hidden, max_tokens):
    ranks.run(wide_rows, low_latency, hidden, max_tokens)


def rows_in_pieces(ctx, *case):
    """Of each row combine adds up a few columns at a time."""
    with mock.patch.object(memory, "ADDED_BYTES", 32):
        wide_rows(ctx, *case)


@pytest.mark.ranks(2)
def test_rows_that_are_added_up_in_pieces(ranks):
    ranks.run(rows_in_pieces, False, 100, 3)


def host_counts(ctx):
    layer = Layer(ctx.num_ranks, F32, ctx.device)
    ep = experts(ctx, layer)
    x, ids, _ = layer.inputs("random", 0, ctx.cur_rank)
    received = ep.dispatch(x, ids, layout="compact")
    counts, offsets = received.to_host()
    assert counts == [len(layer.rows("random", 0, ep.first_expert + local)) for local in range(E_EACH)]
    assert offsets == [128 * sum(-(-count // 128) for count in counts[:local]) for local in range(E_EACH + 1)]
    received.release()
    done_with(ctx, ep)


@pytest.mark.ranks(2)
def test_exact_sizes_on_the_host(ranks):
    ranks.run(host_counts)


def of_a_group(ctx, low_latency):
    """Of all ranks but the second: experts are numbered by the ranks of the group."""
    members = [rank for rank in range(ctx.num_ranks) if rank != 1]
    group = dist.new_group(members)
    if ctx.cur_rank in members:
        rank = dist.get_rank(group)
        layer = Layer(len(members), F32, ctx.device)
        ep = experts(ctx, layer, group=group, low_latency=low_latency)
        assert ep.first_expert == rank * E_EACH
        for round in range(2):
            compare(layer, call(layer, ep, "random", round, rank)[2], "random", round, rank, "dispatched")
        ctx.barrier(group=group)
        ep.close()
    ctx.barrier()


@pytest.mark.ranks(2, 3)
@both_forms
def test_a_group(ranks, low_latency):
    ranks.run(of_a_group, low_latency)
