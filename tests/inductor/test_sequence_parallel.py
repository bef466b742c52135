"""Sequence parallelism in compiled graphs: gathers before products and scatters of sums after them; and what stays."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from covering import EVERYTHING, sample
from torch import nn
from torch.nn import functional as F

from inductor.searched import FusionReport, compiled, expect
from iris.inductor import all_gather, compile_options, fusion_report, joined, reduce_scatter

# Gathers are those with gradients here: torch 2.11 does not trace `all_gather_tensor`.
K, N = 16, 24
GATHER, SCATTER = "all_gather + product", "product + reduce_scatter"
# Shapes of this rank's rows, and the dimension that is gathered, or scattered.
PLACES = [((4, 3, K), 0), ((1, 4, K), 1), ((2, 4, 3, K), 1)]
PLACES += [((6, K), 0), ((2, 4, K), 1), ((2, 3, 4, K), 2)] if EVERYTHING else []
RANKS = (2, 4) if EVERYTHING else (2,)
DTYPES = [torch.float32, torch.bfloat16]


# That of all ranks, in each of their processes. Iris' backend takes several ranks on one GPU.
GROUP = []


def run_with_group(ranks, worker, *args):
    ranks.run(with_group, worker, *args)


def with_group(ctx, worker, *args):
    if not GROUP:
        GROUP.append(dist.new_group(backend="cuda:iris"))
    worker(ctx, *args)


def random(ctx, shape, dtype=torch.float32, seed=0):
    """Each rank's."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype).to(ctx.device) for _ in range(ctx.num_ranks)]


def near(result, exact, dtype, size=16):
    """``size``: about that of the terms that are added up, 16 of 1 or more."""
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(result.double(), exact, rtol=tolerance, atol=size * tolerance)


def gather(ctx, shape, dim, dtype, biased):
    report, me = FusionReport(), ctx.cur_rank

    def function(x, weight, bias):
        return torch.relu(F.linear(funcol.all_gather_tensor_autograd(x, dim, GROUP[0]), weight, bias))

    run = compiled(function, report)
    weight, bias = random(ctx, (N, K), dtype, 1)[me], random(ctx, (N,), dtype, 2)[me] if biased else None
    for turn in range(2):
        x = random(ctx, shape, dtype, 10 + turn)
        with torch.no_grad():
            result = run(x[me], weight, bias)
        exact = torch.cat(x, dim).double() @ weight.double().t()
        near(result, torch.relu(exact if bias is None else exact + bias.double()), dtype)
    expect(report, {GATHER: 1})


@pytest.mark.ranks(*RANKS)
def test_gathered_rows_and_a_product(ranks):
    for (shape, dim), dtype, biased in sample(PLACES, DTYPES, [False, True]):
        run_with_group(ranks, gather, shape, dim, dtype, biased)


def scatter(ctx, shape, dim, dtype, op):
    report, me, W = FusionReport(), ctx.cur_rank, ctx.num_ranks
    whole = list(shape)
    whole[dim] *= W

    def function(x, weight):
        return funcol.reduce_scatter_tensor(torch.tanh(x) @ weight, op, dim, GROUP[0]) + 1

    run, weight = compiled(function, report), random(ctx, (K, N), dtype, 1)
    for turn in range(2):
        x = random(ctx, whole, dtype, 10 + turn)
        with torch.no_grad():
            result = run(x[me], weight[me])
        total = sum(torch.tanh(a).double() @ b.double() for a, b in zip(x, weight, strict=True))
        near(result, total.chunk(W, dim)[me] / (W if op == "avg" else 1) + 1, dtype)
    expect(report, {SCATTER: 1})


@pytest.mark.ranks(*RANKS)
def test_a_product_and_its_scattered_sum(ranks):
    for (shape, dim), dtype, op in sample(PLACES, DTYPES, ["sum", "avg"]):
        run_with_group(ranks, scatter, shape, dim, dtype, op)


# Sums of products are joined from so many rows on, which these tests have not.
joining = mock.patch.object(joined, "LEAST_ROWS", 1)


@joining
def scatter_sum(ctx, shape, dim):
    """Of three products of different depths."""
    report, me, W = FusionReport(), ctx.cur_rank, ctx.num_ranks
    whole = list(shape)
    whole[dim] *= W

    def function(x, weights):
        y, z = torch.tanh(x), torch.relu(x[..., :4])
        return scattered(x @ weights[0] + (y @ weights[1] + z @ weights[2]), dim=dim) + 1

    run, weights = compiled(function, report), [random(ctx, (k, N), seed=k) for k in (K, K, 4)]
    x = random(ctx, whole, seed=10)
    with torch.no_grad():
        result = run(x[me], [each[me] for each in weights])
    total = 0
    for rank, a in enumerate(x):
        for rows, each in zip((a, torch.tanh(a), torch.relu(a[..., :4])), weights, strict=True):
            total = total + rows.double() @ each[rank].double()
    near(result, total.chunk(W, dim)[me] + 1, torch.float32)
    expect(report, {SCATTER: 1})


@pytest.mark.ranks(*RANKS)
@pytest.mark.parametrize("shape, dim", [((12, K), 0), ((2, 8, K), 1)])
def test_a_sum_of_products_is_scattered(ranks, shape, dim):
    run_with_group(ranks, scatter_sum, shape, dim)


def by_name(ctx):
    """As torch.distributed's own functions leave them."""
    report, me, W = FusionReport(), ctx.cur_rank, ctx.num_ranks

    def function(x, up, down):
        rows = x.new_empty(W * x.shape[0], K)
        dist.all_gather_into_tensor(rows, x)
        product = torch.relu(rows @ up) @ down
        part = product.new_empty(x.shape[0], K)
        dist.reduce_scatter_tensor(part, product)
        return part

    x, up, down = random(ctx, (3, K)), random(ctx, (K, N), seed=1), random(ctx, (N, K), seed=2)
    with torch.no_grad():
        result = compiled(function, report)(x[me], up[me], down[me])
    hidden = [torch.relu(torch.cat(x).double() @ each.double()) for each in up]
    total = sum(a @ b.double() for a, b in zip(hidden, down, strict=True))
    near(result, total.chunk(W)[me], torch.float32)
    expect(report, {GATHER: 1, SCATTER: 1})


@pytest.mark.ranks(*((1, 2) if EVERYTHING else (2,)))
def test_collectives_of_torch_distributed(ranks):
    run_with_group(ranks, by_name)


def several(ctx, dim, first):
    """The product with the most columns is fused, wherever it is, and the others have the rows that it leaves."""
    report, me = FusionReport(), ctx.cur_rank
    shape = (2, 4, K)

    def function(x, large, small, bias):
        rows = funcol.all_gather_tensor_autograd(x, dim, GROUP[0])
        # What is used of the rows before the product comes after it.
        early = rows.amax(-1) if first else None
        one = F.linear(rows, small)
        # The weight of the large one is computed after the small one.
        two = F.linear(rows, torch.tanh(large) + 1, bias)
        return early, one, two, rows.sum(-1)

    x = random(ctx, shape)
    large, small, bias = (random(ctx, each, seed=seed)[me] for seed, each in enumerate([(N, K), (8, K), (N,)], 1))
    with torch.no_grad():
        early, one, two, total = compiled(function, report)(x[me], large, small, bias)
    rows = torch.cat(x, dim).double()
    near(one, rows @ small.double().t(), torch.float32)
    near(two, rows @ (torch.tanh(large) + 1).double().t() + bias.double(), torch.float32)
    near(total, rows.sum(-1), torch.float32)
    if first:
        assert torch.equal(early, torch.cat(x, dim).amax(-1))
    expect(report, {GATHER: 1})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_rows_that_several_use(ranks, dim, first):
    run_with_group(ranks, several, dim, first)


# A transformer's block with DTensor's plans ---------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.o = (nn.Linear(K, K, bias=False) for _ in range(3))
        self.v = nn.Linear(K, K)

    def forward(self, x):
        return self.o(torch.tanh(self.q(x) * self.k(x)) * self.v(x))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(K, 2 * K, bias=False), nn.Linear(2 * K, K, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.behind, self.attention, self.mlp = nn.RMSNorm(K), nn.RMSNorm(K), Attention(), Mlp()

    def forward(self, x):
        x = x + self.attention(self.before(x))
        return x + self.mlp(self.behind(x))


def parallel(ctx):
    """The same on all ranks, and shared among them."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    torch.manual_seed(5)
    block = Block().to(ctx.device)
    whole = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    plan = {"before": SequenceParallel(), "behind": SequenceParallel(), "attention": whole, "mlp": whole}
    plan |= {f"attention.{name}": ColwiseParallel() for name in "qkv"} | {"mlp.up": ColwiseParallel()}
    plan |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.o", "mlp.down")}
    return parallelize_module(block, DeviceMesh.from_group(GROUP[0], ctx.device.type), plan)


@joining
def train(ctx, how):
    """Outputs and gradients as of one process, with and without Iris."""
    W, me, report = ctx.num_ranks, ctx.cur_rank, FusionReport()
    x = random(ctx, (2, 4 * W, K))[0]
    torch.manual_seed(5)
    alone, given = Block().to(ctx.device), x.clone().requires_grad_()
    exact = alone(given)
    exact.sin().sum().backward()
    block, mine = parallel(ctx), x.chunk(W, 1)[me].clone().requires_grad_()
    by_inductor = how == "inductor"
    run = torch.compile(block, fullgraph=True, options=compile_options()) if by_inductor else compiled(block, report)
    out = run(mine)
    out.sin().sum().backward()
    torch.testing.assert_close(out, exact.chunk(W, 1)[me], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mine.grad, given.grad.chunk(W, 1)[me], rtol=1e-4, atol=1e-4)
    for name, parameter in block.named_parameters():
        gradient = parameter.grad.full_tensor()
        torch.testing.assert_close(gradient, alone.get_parameter(name).grad, rtol=1e-4, atol=1e-4)
    if how == "graphs":
        # Forward, four; backward, the gradients of both scattered sums, and of the product after the second gather.
        # That of q, k and v, a sum of three products, becomes one product.
        expect(report, {GATHER: 4, SCATTER: 4})


@pytest.mark.ranks(2)
def test_a_block_of_a_transformer_is_trained(ranks):
    run_with_group(ranks, train, "graphs")


# What stays -----------------------------------------------------------------------------------------------------------


def rows_of(x, dim=0):
    return funcol.all_gather_tensor_autograd(x, dim, GROUP[0])


def scattered(x, op="sum", dim=0):
    return funcol.reduce_scatter_tensor(x, op, dim, GROUP[0])


def used_twice(x, w):
    product = x @ w
    return scattered(product), product.sum()


# By name: what is computed of x, [4, 4 K], and w, [4 K, 4 K]; and the reasons that the report gives.
STAYS = {
    "no product": (lambda x, w: rows_of(x) + 1, "no product has what is gathered as its rows"),
    "the second matrix": (lambda x, w: w[:, :4] @ rows_of(x)[:4], "no product has what is gathered as its rows"),
    "columns": (lambda x, w: rows_of(x, 1)[:, : w.shape[0]] @ w, "no product has what is gathered as its rows"),
    "other rows": (
        lambda x, w: rows_of(x).view(-1, 2 * x.shape[1]) @ torch.cat([w, w]),
        "no product has what is gathered as its rows",
    ),
    "its own square": (lambda x, w: (y := rows_of(x[:, : 4 * 1])) @ y[:4], "depends on what is gathered"),
    "double": (lambda x, w: rows_of(x.double()) @ w.double(), "there is a tensor of torch.float64"),
    "converted": (lambda x, w: rows_of(x).bfloat16() @ w.bfloat16(), "no product has what is gathered as its rows"),
    "the largest": (lambda x, w: scattered(x @ w, "max"), "the reduction is 'max'"),
    "no product is scattered": (lambda x, w: scattered(x + 1), "and not of a product"),
    "an input": (lambda x, w: scattered(x), "what is summed is an input of the graph and not of a product"),
    "used twice": (used_twice, "the product is used elsewhere"),
    "a sum of few rows": (lambda x, w: scattered(x @ w + x @ w.t()), "the result of aten.add.Tensor"),
    "a sum with another term": (lambda x, w: scattered(x[:, :1] @ w[:1] + x), "the result of aten.add.Tensor"),
    "a bias": (lambda x, w: scattered(F.linear(x, w, w[0])), "each rank adds its bias"),
    "columns are scattered": (lambda x, w: scattered(x @ w, dim=1), "columns are scattered"),
    "a mean of float16": (lambda x, w: scattered(x.half() @ w.half(), "avg"), "a sum of float16 may be too large"),
    "a sum of double": (lambda x, w: scattered(x.double() @ w.double()), "the product is torch.float64"),
}


def stays(ctx, name):
    function, reason = STAYS[name]
    x, w, report = random(ctx, (4, 4 * K))[ctx.cur_rank], random(ctx, (4 * K, 4 * K), seed=1)[0], FusionReport()
    if name == "its own square":
        x = x[:, :4].contiguous()
    with torch.no_grad():
        results = [run(x, w) for run in (compiled(function, report), function)]
    torch.testing.assert_close(*results, rtol=2e-2 if "16" in name or "conv" in name else None,
                               atol=2e-2 if "16" in name or "conv" in name else None)  # fmt: skip
    expect(report, {}, reason)


@pytest.mark.ranks(2)
def test_what_stays_as_it_is(ranks):
    for name in STAYS:
        run_with_group(ranks, stays, name)


def elsewhere(ctx):
    """As on a machine with GPUs, where a group of Gloo moves what is on the CPU."""
    x, w, report = random(ctx, (4, K))[ctx.cur_rank], random(ctx, (K, K), seed=1)[0], FusionReport()
    with (
        torch.no_grad(),
        mock.patch.object(all_gather, "DEVICE", "elsewhere"),
        mock.patch.object(reduce_scatter, "DEVICE", "elsewhere"),
    ):
        compiled(lambda x, w: scattered(rows_of(x) @ w), report)(x, w)
    expect(report, {}, "it is computed on", "it is computed on")


@pytest.mark.ranks(2)
def test_what_is_on_another_device_stays(ranks):
    run_with_group(ranks, elsewhere)


def unknown_sizes(ctx):
    """One that is not known is no matter; with two there is no view of the rows in the order of the other dimension."""
    me, w = ctx.cur_rank, random(ctx, (K, N), seed=1)[0]
    cases = [((0, 1), 0, True), ((0, 1), 1, False), ((1,), 1, True), ((0,), 1, True)]
    for dynamic, dim, fused in cases if EVERYTHING else cases[:2]:
        report = FusionReport()

        def function(x, w, dim=dim):
            return scattered(torch.relu(rows_of(x, dim) @ w) @ w.t(), dim=dim)

        run = compiled(function, report)
        for turn in range(2):
            x = random(ctx, (4 + turn * (0 in dynamic), 6 + 2 * turn * (1 in dynamic), K), seed=turn)
            for each in dynamic:
                torch._dynamo.mark_dynamic(x[me], each)
            with torch.no_grad():
                result = run(x[me], w)
            hidden = torch.relu(torch.cat(x, dim).double() @ w.double()) @ w.double().t()
            # Terms of a product of what is itself the product of terms.
            near(result, (ctx.num_ranks * hidden).chunk(ctx.num_ranks, dim)[me], torch.float32, size=16 * 16)
        if fused:
            expect(report, {GATHER: 1, SCATTER: 1})
        else:
            expect(report, {}, "extents of several dimensions", "extents of several dimensions")


@pytest.mark.thorough
@pytest.mark.ranks(2)
def test_numbers_of_rows_that_are_not_known(ranks):
    run_with_group(ranks, unknown_sizes)


# The code that Inductor makes -----------------------------------------------------------------------------------------


def through_inductor(ctx):
    torch.compiler.reset()
    fusion_report().clear()
    # What is taken from a cache is not in the report.
    with torch.compiler.config.patch(force_disable_caches=True):
        train(ctx, "inductor")
    assert {pattern: fusion_report().fused(pattern) for pattern in (GATHER, SCATTER)} == {GATHER: 4, SCATTER: 4}


@pytest.mark.ranks(2)
@pytest.mark.skipif(not EVERYTHING, reason="Inductor's C++ takes a minute to compile")
def test_a_block_through_inductor(ranks):
    run_with_group(ranks, through_inductor)
