"""A layer of experts of transformers on `ctx.experts`: results and all gradients are those of one process."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from integrations.models import EACH, MOST, H, Meshes, close, experts_of, inputs, registered, share_out
from iris.errors import InvalidExpertsError, InvalidGroupError
from iris.integrations.transformers import register
from iris.integrations.transformers.groups import context_of
from iris.integrations.transformers.usual_form import has_usual_form

ROUNDS = 3


def tokens_of(round, number, shared):
    """Another number each time, at times none; of a batch that is shared, once more than there was room for before."""
    return (4 * round + 3 * number + 5) % MOST + (3 * MOST if shared and round == ROUNDS - 1 else 0)


def layer(ctx, kind, batch, backend, trained, compiled):
    experts, meshes = experts_of(kind, ctx.num_ranks).to(ctx.device), Meshes(ctx, batch, backend)
    with registered(max_tokens=MOST):
        own = share_out(experts, meshes)
    forward = own
    tokens = [[tokens_of(round, number, batch == "shared") for number in meshes.batches] for round in range(ROUNDS)]
    if compiled:
        # First forwards set memory aside, which is no part of a graph.
        for each in tokens:
            given = inputs(0, meshes.number, ctx.num_ranks, each[meshes.number])
            with torch.no_grad():
                own(*(tensor.to(ctx.device) for tensor in given))
        torch._dynamo.reset()  # of other tests' layers, which have the same code
        forward = torch.compile(own, fullgraph=True, backend="aot_eager", dynamic=True)
    for round in range(ROUNDS):
        found = []
        experts.zero_grad(), own.zero_grad()
        for each in meshes.batches:
            given = inputs(round, each, ctx.num_ranks, tokens[round][each])
            x, ids, weights = (tensor.to(ctx.device) for tensor in given)
            x.requires_grad_(trained), weights.requires_grad_(trained)
            out = experts(x, ids, weights)
            scale = torch.linspace(0.5, 2, H, device=ctx.device) * (1 + each)
            if trained:
                (out * scale).sum().backward()
            if each == meshes.number:
                mine = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in (x, ids, weights)]
                with torch.set_grad_enabled(trained):
                    got = forward(*mine)
                close(got, out)
                if trained:
                    (got * scale).sum().backward()
                    found = [(mine[0], x), (mine[2], weights)]
        for tensor, expected in found:
            close(tensor.grad, expected.grad)
        for name, parameter in own.named_parameters() if trained else ():
            # All ranks that share a batch have backpropagated the same loss, each of its share.
            first = ctx.cur_rank * EACH
            close(parameter.grad.to_local(), experts.get_parameter(name).grad[first : first + EACH])


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("kind", "batch", "backend", "trained", "compiled"),
    [
        ("usual", "shared", "iris", False, False),
        ("unusual", "different", None, True, False),
        pytest.param("usual", "shared", None, True, True, marks=pytest.mark.thorough),
        pytest.param("usual", "different", None, False, True, marks=pytest.mark.thorough),
        pytest.param("unusual", "shared", "iris", False, True, marks=pytest.mark.thorough),
        pytest.param("usual", "different", "iris", True, True, marks=pytest.mark.thorough),
    ],
)
def test_results_and_gradients(ranks, kind, batch, backend, trained, compiled):
    ranks.run(layer, kind, batch, backend, trained, compiled)


@pytest.mark.thorough
@pytest.mark.ranks(4)
@pytest.mark.parametrize("trained", [False, True])
def test_batches_that_some_ranks_share(ranks, trained):
    ranks.run(layer, "usual", "mixed", None, trained, False)


def groups_come_and_go(ctx):
    group = dist.new_group()
    context = context_of(group, ctx.device)
    assert context.num_ranks == ctx.num_ranks
    assert context_of(group, ctx.device) is context
    dist.destroy_process_group(group)
    other = context_of(dist.new_group(), ctx.device)
    assert other is not context and context.heap.closed


@pytest.mark.ranks(2)
def test_a_context_lives_as_long_as_its_group(ranks):
    ranks.run(groups_come_and_go)


def misuse(ctx):
    experts, meshes = experts_of("usual", ctx.num_ranks).to(ctx.device), Meshes(ctx, "different", None)
    with registered(max_tokens=MOST):
        own = share_out(experts, meshes)
    given = [each.to(ctx.device) for each in inputs(0, ctx.cur_rank, ctx.num_ranks, MOST + 1)]
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
