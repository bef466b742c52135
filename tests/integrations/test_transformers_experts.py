"""A layer of experts of transformers on `ctx.experts`: results and all gradients are those of one process."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from covering import thorough
from torch.distributed.device_mesh import DeviceMesh

from integrations.models import EACH, MOST, H, Meshes, experts_of, inputs, near, registered, share_out
from iris.distributed.contexts import context_of
from iris.errors import InvalidExpertsError, InvalidGroupError, PeerFailedError
from iris.integrations.transformers import register
from iris.integrations.transformers.usual_form import has_usual_form

ROUNDS = 3


def tokens_of(round, number, shared):
    """Another number each time, at times none. In the end more than there was room for, or none on any rank."""
    if round == ROUNDS - 1:
        return 3 * MOST + 1 if shared else 0
    return (4 * round + 3 * number + 5) % MOST


def layer(ctx, kind, batch, backend, trained, compiled, dtype):
    meshes, experts = Meshes(ctx, batch, backend), experts_of(kind, ctx.num_ranks).to(ctx.device, dtype)
    # Room that is asked for; or what the ranks agree on, when the first one has 5 tokens: 8.
    with registered(max_tokens=MOST if backend == "iris" else None):
        own = share_out(experts, meshes)
    experts.float()
    tokens = [[tokens_of(round, number, batch == "shared") for number in meshes.batches] for round in range(ROUNDS)]

    def batch_of(round, number):
        x, *routes = inputs(round, number, ctx.num_ranks, tokens[round][number])
        x, ids, weights = (each.to(ctx.device) for each in (x.to(dtype), *routes))
        return x.requires_grad_(trained), ids, weights.requires_grad_(trained)

    forward = own
    if compiled:
        # First forwards set memory aside, which is no part of a graph.
        for round in range(ROUNDS):
            own(*batch_of(round, meshes.number))
        torch._dynamo.reset()  # of other tests' layers, which have the same code
        forward = torch.compile(own, fullgraph=True, backend="aot_eager", dynamic=True)
    for round in range(ROUNDS):
        experts.zero_grad(), own.zero_grad()
        scales = [torch.linspace(0.5, 2, H, device=ctx.device) * (1 + number) for number in meshes.batches]
        results = []
        for number in meshes.batches:
            x, ids, weights = batch_of(round, number)
            x = x.detach().float().requires_grad_(trained)
            results.append((experts(x, ids, weights), x, weights))
        x, ids, weights = batch_of(round, meshes.number)
        with torch.set_grad_enabled(trained):
            got = forward(x, ids, weights)
        near(got, results[meshes.number][0], dtype)
        if trained:
            (got.float() * scales[meshes.number]).sum().backward()
            sum((out * scale).sum() for (out, *_), scale in zip(results, scales, strict=True)).backward()
            for tensor, expected in zip((x, weights), results[meshes.number][1:], strict=True):
                near(tensor.grad, expected.grad, dtype)
            first = ctx.cur_rank * EACH
            for name, parameter in own.named_parameters():
                near(parameter.grad.to_local(), experts.get_parameter(name).grad[first : first + EACH], dtype)


F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("kind", "batch", "backend", "trained", "compiled", "dtype"),
    [
        thorough("usual", "shared", "iris", False, False, F32),
        ("usual", "different", None, True, False, BF16),
        thorough("unusual", "different", None, True, False, F32),
        thorough("usual", "shared", None, True, True, F32),
        thorough("usual", "different", None, False, True, BF16),
        thorough("usual", "shared", "iris", True, True, BF16),
        thorough("unusual", "shared", "iris", False, True, F32),
        thorough("usual", "different", "iris", True, True, F32),
    ],
)
def test_results_and_gradients(ranks, kind, batch, backend, trained, compiled, dtype):
    ranks.run(layer, kind, batch, backend, trained, compiled, dtype)


@pytest.mark.thorough
@pytest.mark.ranks(4)
@pytest.mark.parametrize("trained", [False, True])
def test_batches_that_some_ranks_share(ranks, trained):
    ranks.run(layer, "usual", "mixed", None, trained, False, F32)


def groups_come_and_go(ctx):
    group = dist.new_group()
    context = context_of(group, ctx.device)
    assert context.num_ranks == ctx.num_ranks
    assert context_of(group, ctx.device) is context
    dist.destroy_process_group(group)
    other = context_of(dist.new_group(), ctx.device)
    assert other is not context and context.heap.closed


def layers_come_and_go(ctx):
    """What layers share does not keep the context of a group that is gone."""
    experts, meshes = experts_of("usual", ctx.num_ranks).to(ctx.device), Meshes(ctx, "shared", None)
    group = meshes.experts.get_group()
    with registered():
        layers = [share_out(experts, meshes) for _ in range(2)]
    with torch.no_grad():
        one, other = (layer(*(each.to(ctx.device) for each in inputs(0, 0, ctx.num_ranks, 3))) for layer in layers)
    assert torch.equal(one, other)
    context = context_of(group, ctx.device)
    assert len(context._experts._open) == 1
    gone = weakref.ref(context)
    dist.destroy_process_group(group)
    del layers, meshes, group, context
    context_of(dist.new_group(), ctx.device)
    gc.collect()
    assert gone() is None


@pytest.mark.ranks(2)
@pytest.mark.parametrize("worker", [groups_come_and_go, layers_come_and_go])
def test_a_context_lives_as_long_as_its_group(ranks, worker):
    ranks.run(worker)


def misuse(ctx):
    experts, meshes = experts_of("usual", ctx.num_ranks).to(ctx.device), Meshes(ctx, "different", None)
    with registered(max_tokens=MOST):
        own = share_out(experts, meshes)
    given = [each.to(ctx.device) for each in inputs(0, ctx.cur_rank, ctx.num_ranks, MOST + 1)]
    # In a first forward the ranks meet, so that the others know of it.
    too_many = r"has 9 tokens on this rank, .* for 8 each"
    with pytest.raises(InvalidExpertsError if ctx.cur_rank else PeerFailedError, match=too_many):
        own(*(given if ctx.cur_rank else (each[:1] for each in given)))
    own(*(each[:1] for each in given))
    with pytest.raises(InvalidExpertsError, match=r"has 9 tokens on this rank, .* for 8 each.*register\(max_tokens="):
        own(*given)
    meshes.experts = DeviceMesh(ctx.device.type, [1, 0], mesh_dim_names=("ep",))
    with pytest.raises(InvalidGroupError, match=rf"as number {1 - ctx.cur_rank}, .* as {ctx.cur_rank}\."):
        share_out(experts, meshes)


@pytest.mark.ranks(2, exactly=True)
def test_mistakes_are_told(ranks, mistaken):
    ranks.run(misuse)


def test_which_experts_are_multiplied_by_iris():
    """Those of gated products with SiLU, which is no question of their names."""
    usual = experts_of("usual", 1)
    assert has_usual_form(usual)
    assert not has_usual_form(experts_of("unusual", 1))

    class WithGateOfItsOwn(type(usual)):
        def _apply_gate(self, x):
            return x[:, ::2]

    usual.__class__ = WithGateOfItsOwn
    assert not has_usual_form(usual)
    other = experts_of("usual", 1)
    other.act_fn = torch.nn.GELU()
    assert not has_usual_form(other)


def test_a_bound_is_a_number_of_tokens():
    for wrong in (0, -1, 2.5, "many"):
        with pytest.raises(InvalidExpertsError, match="a whole number, 1 or more, or None"):
            register(max_tokens=wrong)
