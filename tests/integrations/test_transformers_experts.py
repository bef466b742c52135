"""A layer of experts of transformers on `ctx.experts`: results and all gradients are those of one process."""

import copy

import pytest
import torch
from covering import EVERYTHING

from integrations.models import alone, close, mesh_of, registered
from iris.errors import InvalidExpertsError
from transformers import GptOssConfig, MixtralConfig
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

H, I, K, EACH = 16, 8, 3, 2
ROUNDS = 3


def experts_of(kind, size):
    """With random weights. "usual": gated, by SiLU. "unusual": with biases, transposed and interleaved weights."""
    sizes = {"hidden_size": H, "intermediate_size": I, "num_local_experts": EACH * size, "num_experts_per_tok": K}
    usual = kind == "usual"
    config = (MixtralConfig if usual else GptOssConfig)(**sizes)
    config._experts_implementation = "grouped_mm"
    module = (MixtralExperts if usual else GptOssExperts)(config)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) / 4)
    return module


def inputs(round, number, size, tokens):
    """Tokens, choices and weights of the batch of this number: of some tokens a choice is made twice."""
    generator = torch.Generator().manual_seed(100 * round + number)
    x = torch.randn(tokens, H, generator=generator)
    ids = torch.rand(tokens, EACH * size, generator=generator).topk(K).indices
    ids[::3, 2] = ids[::3, 0]
    return x, ids, torch.rand(tokens, K, generator=generator)


def tokens_of(round, number):
    """Another number each time, at times none."""
    return (4 * round + 3 * number + 5) % 8


def distribute(ctx, experts, batch, backend):
    """The experts of this rank, which call ``ctx.experts``; the number of its batch, and those of all batches."""
    size, rank = ctx.num_ranks, ctx.cur_rank
    sharers = {"shared": size, "different": 1, "mixed": size // 2}[batch]
    ep_mesh = mesh_of(ctx, list(range(size)), "ep", backend)
    if sharers == 1:
        tp_mesh = alone(ctx, backend)
    else:
        parts = [list(range(first, first + sharers)) for first in range(0, size, sharers)]
        tp_mesh = next(mesh for mesh in [mesh_of(ctx, part, "tp", backend) for part in parts] if mesh is not None)
    model = torch.nn.Module()
    model.experts = copy.deepcopy(experts).to(ctx.device)
    plan = {f"experts.{name}": "grouped_gemm" for name, _ in experts.named_parameters()}
    plan["experts"] = "ep_dispatch_experts"
    apply_expert_parallelism(model, ep_mesh, tp_mesh, plan, ep_implementation="iris")
    return model.experts, rank // sharers, range(size // sharers)


def layer(ctx, kind, batch, backend, trained, compiled):
    experts = experts_of(kind, ctx.num_ranks)
    with registered(max_tokens=None if batch == "shared" else 8):
        own, number, batches = distribute(ctx, experts, batch, backend)
    experts.to(ctx.device)
    forward = own
    if compiled:
        # The first forward sets memory aside, which is no part of a graph.
        with torch.no_grad():
            own(*(each.to(ctx.device) for each in inputs(0, number, ctx.num_ranks, 8)))
        forward = torch.compile(own, fullgraph=True, backend="aot_eager", dynamic=True)
    for round in range(ROUNDS):
        found = []
        experts.zero_grad(), own.zero_grad()
        for each in batches:
            given = inputs(round, each, ctx.num_ranks, tokens_of(round, each))
            x, ids, weights = (tensor.to(ctx.device) for tensor in given)
            x.requires_grad_(trained), weights.requires_grad_(trained)
            out = experts(x, ids, weights)
            scale = torch.linspace(0.5, 2, H, device=ctx.device) * (1 + each)
            if trained:
                (out * scale).sum().backward()
            if each == number:
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
        ("usual", "shared", "cpu:iris", False, False),
        ("unusual", "different", "gloo", True, False),
        pytest.param("usual", "shared", "gloo", True, True, marks=pytest.mark.thorough),
        pytest.param("usual", "different", "gloo", False, True, marks=pytest.mark.thorough),
        pytest.param("unusual", "shared", "cpu:iris", False, True, marks=pytest.mark.thorough),
        pytest.param("usual", "different", "cpu:iris", True, True, marks=pytest.mark.thorough),
    ],
)
def test_results_and_gradients(ranks, kind, batch, backend, trained, compiled):
    ranks.run(layer, kind, batch, backend, trained, compiled)


@pytest.mark.thorough
@pytest.mark.ranks(4)
@pytest.mark.parametrize("trained", [False, True])
def test_batches_that_some_ranks_share(ranks, trained):
    ranks.run(layer, "usual", "mixed", "gloo", trained, False)
