"""How long the memory of experts, and what a dispatch has put there, may be used."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from experts.layers import Layer, done_with, experts
from iris.errors import HeapClosedError
from iris.experts import ExpertsConfig

F32 = torch.float32


def dispatch_once(ctx, layer, ep, rank):
    x, ids, _ = layer.inputs("random", 0, rank)
    received = ep.dispatch(x, ids)
    return ep.combine(received.rows, received)


def closed_ones(ctx):
    """The context keeps one that a program has dropped, since kernels may use it; and none that is closed."""
    layer = Layer(ctx.num_ranks, F32, ctx.device)
    ep = experts(ctx, layer)
    dispatch_once(ctx, layer, ep, ctx.cur_rank)
    closed = weakref.ref(ep)
    done_with(ctx, ep)
    dropped = weakref.ref(experts(ctx, layer))
    del ep
    gc.collect()
    assert closed() is None and dropped() is not None
    done_with(ctx, dropped())


def memory_of_closed_ones(ctx):
    """Neither they nor what a dispatch has returned keep the symmetric memory."""
    layer = Layer(ctx.num_ranks, F32, ctx.device)
    ep = experts(ctx, layer)
    memory = weakref.ref(ep._calls._memory.mapping.memory)
    x, ids, weights = layer.inputs("random", 0, ctx.cur_rank)
    received = ep.dispatch(x, ids, weights)
    out = ep.combine(received.rows, received)
    assert memory() is not None
    done_with(ctx, ep)
    gc.collect()
    assert memory() is None and received.rows.shape[-1] == out.shape[-1]


@pytest.mark.ranks(2)
def test_memory_of_closed_ones_is_unmapped(ranks):
    ranks.run(memory_of_closed_ones)


@pytest.mark.ranks(1, 2)
def test_closed_ones_are_let_go(ranks):
    ranks.run(closed_ones)


def of_a_group_that_is_gone(ctx):
    layer, group = Layer(ctx.num_ranks, F32, ctx.device), dist.new_group()
    ep, of_all = experts(ctx, layer, group=group), experts(ctx, layer)
    dispatch_once(ctx, layer, ep, ctx.cur_rank)
    dist.destroy_process_group(group)
    ctx.barrier()
    with pytest.raises(HeapClosedError, match="Make another one"):
        dispatch_once(ctx, layer, ep, ctx.cur_rank)
    gone = weakref.ref(ep)
    del ep
    gc.collect()
    assert gone() is None
    dispatch_once(ctx, layer, of_all, ctx.cur_rank)
    done_with(ctx, of_all)


@pytest.mark.ranks(2)
def test_those_of_a_destroyed_group_are_closed(ranks):
    ranks.run(of_a_group_that_is_gone)


def saved_rows(ctx):
    """Rows that autograd has saved are noticed when the next dispatch has written over them."""
    layer = Layer(ctx.num_ranks, F32, ctx.device)
    ep = experts(ctx, layer, ExpertsConfig(in_flight=1))
    x, ids, _ = layer.inputs("random", 0, ctx.cur_rank)
    matrix = torch.ones(layer.hidden, layer.hidden, device=ctx.device, requires_grad=True)

    def forward():
        received = ep.dispatch(x, ids)
        made = received.rows @ matrix
        ep.combine(made.detach(), received)
        return made.sum()

    forward().backward()
    before = forward()
    forward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        before.backward()
    done_with(ctx, ep)


def wanted_gradients(ctx):
    """A gradient that a program asks for belongs to its own result."""
    layer = Layer(ctx.num_ranks, F32, ctx.device)
    ep = experts(ctx, layer)
    x, ids, _ = layer.inputs("random", 0, ctx.cur_rank)
    for _ in range(3):
        received = ep.dispatch(x, ids)
        assert not received.rows.requires_grad and received.rows.grad is None
        received.rows.requires_grad_().sum().backward()
        ep.combine(received.rows.detach(), received)
    done_with(ctx, ep)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("worker", [saved_rows, wanted_gradients])
def test_gradients_beside(ranks, worker):
    ranks.run(worker)
