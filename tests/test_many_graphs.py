"""As many CUDA graphs as a serving engine has, one for each size of a batch, in one pool of memory.

They are captured from the largest to the smallest and replayed in any order, and between them the model is called.
"""

import random

import pytest
import torch
import torch.distributed as dist
from torch import nn

import iris
import iris.distributed  # noqa: F401 (registers the backend)
from iris.inductor import compile_options, fusion_report

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there are no graphs without a GPU")

H, INSIDE, LAYERS, EPS = 512, 384, 3, 1e-6
SIZES = [1, 2, 4, *range(8, 8 * 58, 8)]
REPLAYS = 180


class Model(nn.Module):
    """What ranks share of a decoder without its attention; their parts differ, and norms do not."""

    def __init__(self, group, rank):
        super().__init__()
        self.group = group
        generator = torch.Generator().manual_seed(rank)
        self.norms, self.ups, self.downs = nn.ParameterList(), nn.ParameterList(), nn.ParameterList()
        for layer in range(LAYERS):
            self.norms.append(torch.linspace(0.5, 1.5, H) + layer / 8)
            self.ups.append(torch.randn(H, INSIDE, generator=generator) / H**0.5)
            self.downs.append(torch.randn(INSIDE, H, generator=generator) / INSIDE**0.5)

    def forward(self, x):
        y = x
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            y = nn.functional.silu(y @ up) @ down
            dist.all_reduce(y, group=self.group)
            x = x + y
            y = nn.functional.rms_norm(x, (H,), norm, EPS)
        # One more sum, which no norm follows.
        y = y @ self.ups[0] @ self.downs[0]
        dist.all_reduce(y, group=self.group)
        return x + y


def accelerated(ctx, model):
    """Compiled for any size of a batch."""
    torch._dynamo.reset()
    fusion_report().clear()
    return torch.compile(model, fullgraph=True, dynamic=True, options=compile_options())


def by_hand(ctx, model):
    """The same with `ctx.ops`."""

    def forward(x):
        residual, y = x.clone(), x
        for norm, up, down in zip(model.norms, model.ups, model.downs, strict=True):
            part, y = nn.functional.silu(y @ up) @ down, torch.empty_like(x)
            ctx.ops.all_reduce_rms_norm(y, part, norm, EPS, residual=residual)
        total = torch.empty_like(x)
        ctx.ops.matmul_all_reduce(total, y @ model.ups[0], model.downs[0])
        return residual + total

    return forward


FORMS = {"iris.accelerate": accelerated, "ctx.ops": by_hand}


def near(got, wanted):
    """But for what is rounded elsewhere; of another batch's data nothing would be near."""
    error = torch.linalg.vector_norm(got.double() - wanted.double()) / torch.linalg.vector_norm(wanted.double())
    assert error < 0.02, error.item()


@torch.no_grad()
def replay(ctx, form):
    model = Model(dist.new_group(backend="cuda:iris"), ctx.cur_rank).to(ctx.device, torch.bfloat16)
    run = FORMS[form](ctx, model)
    # What all graphs read, as a serving engine has it; the same on all ranks. A batch is never all of it, for which
    # torch would compile another graph.
    given = torch.zeros(1 + max(SIZES), H, device=ctx.device, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(99)

    def fill(size):
        given[:size].copy_(torch.randn(size, H, generator=generator))

    graphs, results, pool = {}, {}, torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream(ctx.device)
    with torch.compiler.config.patch(force_disable_caches=True):
        for size in reversed(SIZES):
            fill(size)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                run(given[:size])
            torch.cuda.current_stream().wait_stream(stream)
            graphs[size] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[size], pool=pool, stream=stream):
                results[size] = run(given[:size])
    assert len(graphs) == 60
    order = random.Random(5)
    for turn in range(REPLAYS):
        # Each of them, and then again in another order.
        if turn % len(SIZES) == 0:
            sizes = order.sample(SIZES, len(SIZES))
        size = sizes[turn % len(SIZES)]
        fill(size)
        graphs[size].replay()
        got = results[size].clone()
        near(got, model(given[:size]))
        if turn % 20 == 0:
            near(run(given[:size]), got)
    ctx.barrier()
    if form == "iris.accelerate":
        # In each graph that was compiled: of one row, and of any number.
        report = fusion_report()
        assert report and all(each.kept is None for each in report), str(report)
        assert report.fused("all_reduce + residual + RMSNorm") == LAYERS * report.fused("product + all_reduce")
    graphs.clear()
    torch._dynamo.reset()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("form", FORMS)
def test_sixty_graphs_in_one_pool(ranks, form):
    ranks.run(replay, form)
