"""A layer of experts as an operator: the same bits as the call, in a graph of torch.compile; and no gradient."""

import pytest
import torch
from experts.layers import E_EACH, Layer, done_with, experts

from iris.errors import InvalidExpertsError
from iris.experts import ExpertsConfig, functional
from iris.ops.experts_operator import experts_mlp

INNER = 8


def compare(ctx):
    layer = Layer(ctx.num_ranks, torch.float32, ctx.device)
    ep = experts(ctx, layer, ExpertsConfig(layouts=("compact",)))
    generator = torch.Generator().manual_seed(ctx.cur_rank)
    shapes = (E_EACH, 2 * INNER, layer.hidden), (E_EACH, layer.hidden, INNER)
    up, down = (torch.randn(shape, generator=generator).to(ctx.device) for shape in shapes)
    name = functional.name_of(ep)

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    def doubled(x, ids, weights):
        return 2 * experts_mlp(x, ids, weights, up, down, name)

    for round in range(2):
        x, ids, weights = layer.inputs("random", round, ctx.cur_rank)
        expected = torch.empty_like(x)
        ctx.ops.experts_mlp(expected, x, ids, weights, up, down, experts=ep)
        assert torch.equal(doubled(x, ids, weights), 2 * expected)
    ctx.barrier()
    with pytest.raises(InvalidExpertsError, match=r"experts_mlp\(\) has no gradient. Call it under torch.no_grad\(\)"):
        experts_mlp(x.requires_grad_(), ids, weights, up, down, name)
    done_with(ctx, ep)


@pytest.mark.thorough
@pytest.mark.ranks(2)
def test_as_the_call_and_without_gradient(ranks):
    ranks.run(compare)
