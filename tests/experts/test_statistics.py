"""What kernels count, where they are asked to: rows of each expert, and for whom they have waited."""

import dataclasses
import time

import pytest
import torch
from covering import thorough

from experts.layers import E_EACH, WEIGHTS, Layer, both_forms, done_with, experts
from iris.errors import HeapClosedError, InvalidConfigError, InvalidExpertsError
from iris.experts import ExpertsConfig
from iris.heap.history import debugging

F32 = torch.float32
CONFIG = ExpertsConfig(statistics=True, alignment=4)
LATE_S = 0.5


def counted(ctx, low_latency, weighting, layout, async_op):
    """Rows of all dispatches, whatever slot they have; results are those without statistics."""
    layer = Layer(ctx.num_ranks, F32, ctx.device)
    ep = experts(ctx, layer, CONFIG, low_latency=low_latency)
    found = ep.statistics()
    expected = torch.zeros(E_EACH, dtype=torch.int64)
    for round in range(4):
        x, ids, weights = layer.inputs("uneven", round, ctx.cur_rank)
        how = {"layout": layout, "async_op": async_op}
        received = ep.dispatch(x, ids, weights if weighting == "dispatched" else None, **how)
        received = received.wait() if async_op else received
        made = layer.through_experts(received, ep.first_expert)
        out = ep.combine(made, received, weights if weighting == "combined" else None, async_op=async_op)
        out = out.wait() if async_op else out
        assert torch.equal(out.double(), layer.expected("uneven", round, ctx.cur_rank, weighting != "none"))
        expected += torch.tensor([len(layer.rows("uneven", round, ep.first_expert + each)) for each in range(E_EACH)])
        assert torch.equal(found.rows.cpu(), expected)
        if round == 1:
            # From here on anew.
            found.rows.zero_()
            expected.zero_()
    assert [len(each) for each in found] == [E_EACH, ctx.num_ranks, ctx.num_ranks]
    assert all((each >= 0).all() and each.dtype == torch.int64 for each in found)
    done_with(ctx, ep)
    with pytest.raises(HeapClosedError):
        ep.statistics()


@pytest.mark.ranks(1, 2, 3)
@both_forms
@pytest.mark.parametrize("weighting", WEIGHTS)
@pytest.mark.parametrize("layout", ["expanded", "compact"])
@pytest.mark.parametrize("async_op", [False, True])
def test_rows(ranks, low_latency, weighting, layout, async_op):
    ranks.run(counted, low_latency, weighting, layout, async_op)


def waited(ctx, low_latency, late):
    """At least as long as a rank comes late: one to dispatch, and another one to combine."""
    layer = Layer(ctx.num_ranks, F32, ctx.device)
    ep = experts(ctx, layer, CONFIG, low_latency=low_latency)
    x, ids, weights = (each[:3] for each in layer.inputs("random", 0, 0))

    def begin(rank, by):
        ctx.barrier()
        if ctx.cur_rank == rank:
            time.sleep(by)

    found = []
    for round in range(3):
        for each in ep.statistics():
            each.zero_()
        # The first calls may compile: nobody knows who is late there.
        by = LATE_S if round else 0
        begin(late, by)
        received = ep.dispatch(x, ids, weights)
        made = layer.through_experts(received, ep.first_expert)
        begin(1 - late, by)
        ep.combine(made, received)
        found.append(torch.stack([each.cpu() for each in ep.statistics()[1:]]))
    # A machine's load may make those late that are to wait, which then wait less: hardly in both rounds.
    dispatch_wait_ns, combine_wait_ns = torch.stack(found[1:]).amax(dim=0)
    if ctx.cur_rank != late:
        assert dispatch_wait_ns[late] >= LATE_S / 2 * 1e9
    if ctx.cur_rank != 1 - late:
        assert combine_wait_ns[1 - late] >= LATE_S / 2 * 1e9
    done_with(ctx, ep)


@pytest.mark.skipif(debugging(), reason="calls meet on the host, so that kernels wait for nobody")
@pytest.mark.ranks(2, 3)
@both_forms
@pytest.mark.parametrize("late", [0, thorough(1)])
def test_waits(ranks, low_latency, late):
    ranks.run(waited, low_latency, late)


def replay(ctx, low_latency):
    """Each replay adds what it brings; zeros that are written between two of them begin anew."""
    layer = Layer(ctx.num_ranks, F32, ctx.device)
    ep = experts(ctx, layer, CONFIG, low_latency=low_latency)
    x, ids, weights = layer.inputs("random", 0, ctx.cur_rank)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        received = ep.dispatch(x, ids, weights)
        ep.combine(received.rows.clone(), received)
    for replays in (3, 2):
        ep.statistics().rows.zero_()
        for _ in range(replays):
            graph.replay()
        wanted = [len(layer.rows("random", 0, ep.first_expert + each)) for each in range(E_EACH)]
        assert ep.statistics().rows.tolist() == [replays * each for each in wanted]
    done_with(ctx, ep)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are for GPUs")
@pytest.mark.ranks(1, 2)
@both_forms
def test_replays(ranks, low_latency):
    ranks.run(replay, low_latency)


def not_asked_for(ctx, low_latency):
    ep = experts(ctx, Layer(1, F32, ctx.device), low_latency=low_latency)
    with pytest.raises(InvalidExpertsError, match=r"ExpertsConfig\(statistics=True\)"):
        ep.statistics()
    ep.close()
    with pytest.raises(InvalidConfigError, match="statistics is a bool"):
        dataclasses.replace(CONFIG, statistics=1)


@pytest.mark.ranks(1, exactly=True)
@both_forms
def test_they_are_asked_for(ranks, low_latency):
    ranks.run(not_asked_for, low_latency)
