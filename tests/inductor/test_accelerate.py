"""`iris.accelerate` from end to end: what Inductor makes of a model, whatever carries the group's collectives."""

import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import iris
from iris.errors import InvalidArgumentError, MissingPartError
from iris.inductor import FusionReport, compile_options, fusion_report

H, INSIDE = 64, 32


class Layer(nn.Module):
    """What ranks share of a layer: an MLP between norms, as in serving; and products whose rows are split as well."""

    def __init__(self, group):
        super().__init__()
        self.group, self.size = group, dist.get_world_size(group)
        self.norm, self.next_norm = nn.RMSNorm(H, eps=1e-6), nn.RMSNorm(H, eps=1e-6)
        self.up, self.down = nn.Linear(H, INSIDE, bias=False), nn.Linear(INSIDE, H, bias=False)

    def forward(self, residual):
        y = self.down(nn.functional.silu(self.up(self.norm(residual))))
        dist.all_reduce(y, group=self.group)
        residual = residual + y
        rows = self.next_norm(residual)
        whole = rows.new_empty(self.size * rows.shape[0], H)
        dist.all_gather_into_tensor(whole, rows, group=self.group)
        y = self.down(torch.tanh(self.up(whole)))
        mine = torch.empty_like(rows)
        dist.reduce_scatter_tensor(mine, y, group=self.group)
        y = self.down(self.up(mine))
        dist.all_reduce(y, group=self.group)
        return residual, y.tanh()


FUSED = [
    "all_reduce + residual + RMSNorm",
    "all_gather + product",
    "product + reduce_scatter",
    "product + all_reduce",
]


def model(ctx, group):
    """With weights that differ by rank; norms do not."""
    torch.manual_seed(11 + ctx.cur_rank)
    layer = Layer(group)
    nn.init.uniform_(layer.norm.weight, generator=torch.Generator().manual_seed(1))
    nn.init.uniform_(layer.next_norm.weight, generator=torch.Generator().manual_seed(2))
    return layer.to(ctx.device)


def compare(ctx, group, tokens=(3, 3, 3), dynamic=False, **options):
    """Compiled and not, of so many tokens each time."""
    layer = model(ctx, group)
    torch.compiler.reset()
    fusion_report().clear()
    # Inductor takes no mode beside options.
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, options=compile_options() | options)
    # Of a graph from the cache the report says nothing.
    with torch.no_grad(), torch.compiler.config.patch(force_disable_caches=True):
        for turn, count in enumerate(tokens):
            x = torch.randn(count, H, generator=torch.Generator().manual_seed(turn)).to(ctx.device)
            torch.compiler.cudagraph_mark_step_begin()
            torch.testing.assert_close(compiled(x), layer(x), rtol=1e-4, atol=1e-5)
    assert [fusion_report().fused(pattern) for pattern in FUSED] == [1] * 4, str(fusion_report())


def compare_backends(ctx, backend, graphs):
    # Graphs are recorded after two runs without, and replayed from then on.
    compare(ctx, dist.new_group(backend=backend), (3,) * 5, **{"triton.cudagraphs": graphs})


@pytest.mark.thorough
@pytest.mark.ranks(2)
@pytest.mark.parametrize("graphs", [False, True], ids=["called", "in graphs"])
@pytest.mark.parametrize("backend", ["gloo", "cuda:iris"])
def test_a_compiled_model_computes_the_same(ranks, backend, graphs):
    if torch.cuda.is_available():
        backend = backend.replace("gloo", "nccl")
    elif graphs:
        pytest.skip("there are no CUDA graphs without a GPU")
    ranks.run(compare_backends, backend, graphs)


def compare_any_number_of_tokens(ctx):
    compare(ctx, dist.new_group(backend="cuda:iris"), (2, 5, 3, 8), dynamic=True)


@pytest.mark.thorough
@pytest.mark.ranks(2)
def test_shapes_may_be_dynamic(ranks):
    ranks.run(compare_any_number_of_tokens)


def compare_parities(ctx):
    groups = [dist.new_group([*range(first, ctx.num_ranks, 2)], backend="cuda:iris") for first in range(2)]
    compare(ctx, groups[ctx.cur_rank % 2])


@pytest.mark.thorough
@pytest.mark.ranks(4, exactly=True)
def test_the_ranks_are_those_of_the_group(ranks):
    ranks.run(compare_parities)


@pytest.mark.parametrize("model", [torch.nn.functional.relu, "llama", nn.Linear, [nn.Linear(2, 2)], True])
def test_what_is_no_module_is_refused(model):
    """Before anything is put in place."""
    accelerate = sys.modules[iris.accelerate.__module__]
    with mock.patch.object(accelerate, "_registered", []) as registered:
        with pytest.raises(InvalidArgumentError, match=r"torch.nn.Module, and got .*call iris.accelerate\(\) and then"):
            iris.accelerate(model)
    assert registered == []


def test_a_part_of_torch_that_is_missing_is_named_each_time():
    accelerate = sys.modules[iris.accelerate.__module__]
    missing = mock.patch.object(accelerate, "add_graph_pass", side_effect=MissingPartError("it", "to fuse"))
    with mock.patch.object(accelerate, "_registered", []), missing:
        for _ in range(2):
            with pytest.raises(MissingPartError):
                iris.accelerate()


def test_the_report_says_what_was_fused_and_what_not():
    report = FusionReport()
    assert "iris.accelerate" in str(report)
    report += [iris.inductor.Fusion("all_reduce + RMSNorm", None, "layers.0.norm")] * 2
    report.append(iris.inductor.Fusion("product + all_reduce", "the product is used elsewhere", "layers.0.mlp"))
    assert str(report).splitlines() == [
        "   2 x all_reduce + RMSNorm: fused (first at layers.0.norm)",
        "   1 x product + all_reduce: left as it is, since the product is used elsewhere (first at layers.0.mlp)",
    ]
