"""Collectives of two groups in one graph, with tensors of equal shapes: each operator has its own group's ranks."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from covering import EVERYTHING, thorough
from torch.nn import functional as F

from inductor.searched import FusionReport, compiled, expect

M, K, EPS = 4, 16, 1e-5


def neighbours(ctx, rank):
    return [rank // 2 * 2, rank // 2 * 2 + 1]


def strided(ctx, rank):
    return list(range(rank % 2, ctx.num_ranks, 2))


# This rank's groups of neighbours and of every other rank, in each of the processes.
GROUPS = []


def groups(ctx):
    if not GROUPS:
        for members in (neighbours, strided):
            all_of_them = sorted({tuple(members(ctx, rank)) for rank in range(ctx.num_ranks)})
            made = {each: dist.new_group(list(each), backend="cuda:iris") for each in all_of_them}
            GROUPS.append(made[tuple(members(ctx, ctx.cur_rank))])
    return GROUPS


def gather_and_scatter(x, y, weight, a, b):
    rows = funcol.all_gather_tensor_autograd(x, 0, a)
    return funcol.reduce_scatter_tensor(torch.relu(rows @ weight) @ weight.t(), "sum", 0, b)


def exact_gather_and_scatter(x, y, weight, of_a, of_b, rank):
    products = {
        peer: torch.relu(torch.cat([x[each] for each in of_a(peer)]) @ weight[peer]) @ weight[peer].t()
        for peer in of_b(rank)
    }
    return sum(products.values()).chunk(len(of_b(rank)))[of_b(rank).index(rank)]


def gathers(x, y, weight, a, b):
    rows = [funcol.all_gather_tensor_autograd(each, 0, group) for each, group in ((x, a), (y, b))]
    return torch.cat([each @ weight for each in rows])


def exact_gathers(x, y, weight, of_a, of_b, rank):
    rows = [x[each] for each in of_a(rank)] + [y[each] for each in of_b(rank)]
    return torch.cat(rows) @ weight[rank]


def norm_of_both(x, y, weight, a, b):
    total = funcol.all_reduce(x, "sum", a) + funcol.all_reduce(y, "sum", b)
    return F.rms_norm(total, (K,), weight[0], EPS)


def exact_norm_of_both(x, y, weight, of_a, of_b, rank):
    total = sum(x[each] for each in of_a(rank)) + sum(y[each] for each in of_b(rank))
    return F.rms_norm(total, (K,), weight[rank][0], EPS)


def norm_of_each(x, y, weight, a, b):
    normed = F.rms_norm(funcol.all_reduce(x, "sum", a), (K,), weight[0], EPS)
    return normed * F.rms_norm(funcol.all_reduce(y, "sum", b), (K,), weight[0], EPS)


def exact_norm_of_each(x, y, weight, of_a, of_b, rank):
    totals = sum(x[each] for each in of_a(rank)), sum(y[each] for each in of_b(rank))
    one, other = (F.rms_norm(total, (K,), weight[rank][0], EPS) for total in totals)
    return one * other


def sums_of_products(x, y, weight, a, b):
    return funcol.all_reduce(x @ weight, "sum", a) - funcol.all_reduce(y @ weight, "sum", b)


def exact_sums_of_products(x, y, weight, of_a, of_b, rank):
    return sum(x[each] @ weight[each] for each in of_a(rank)) - sum(y[each] @ weight[each] for each in of_b(rank))


def sum_of_a_sum(x, y, weight, a, b):
    return funcol.all_reduce(funcol.all_reduce(x @ weight, "sum", a), "sum", b)


def exact_sum_of_a_sum(x, y, weight, of_a, of_b, rank):
    return sum(x[each] @ weight[each] for peer in of_b(rank) for each in of_a(peer))


# What is fused, and the reasons for what is not.
USES = {
    gather_and_scatter: (exact_gather_and_scatter, {"all_gather + product": 1, "product + reduce_scatter": 1}),
    gathers: (exact_gathers, {"all_gather + product": 2}),
    norm_of_both: (exact_norm_of_both, {"all_reduce + residual + RMSNorm": 1}, "an input of the graph"),
    norm_of_each: (exact_norm_of_each, {"all_reduce + RMSNorm": 2}),
    sums_of_products: (exact_sums_of_products, {"product + all_reduce": 2}),
    sum_of_a_sum: (exact_sum_of_a_sum, {"product + all_reduce": 1}, "iris.matmul_all_reduce"),
}
SAMPLE = {gather_and_scatter, norm_of_both}


def compare(ctx, function):
    exact, fused, *kept = USES[function]
    report, (a, b), rank = FusionReport(), groups(ctx), ctx.cur_rank
    run = compiled(lambda *given: function(*given, a, b), report)
    for turn in range(2):
        generator = torch.Generator().manual_seed(turn)
        x, y, weight = (
            torch.randn(ctx.num_ranks, *shape, generator=generator).to(ctx.device) for shape in ((M, K), (M, K), (K, K))
        )
        with torch.no_grad():
            result = run(x[rank], y[rank], weight[rank])
        members = [lambda rank, of=of: of(ctx, rank) for of in (neighbours, strided)]
        want = exact(*(each.double() for each in (x, y, weight)), *members, rank)
        torch.testing.assert_close(result.double(), want, rtol=1e-4, atol=1e-4)
    expect(report, fused, *kept)


@pytest.mark.ranks(*((2, 4) if EVERYTHING else (4,)), exactly=True)
@pytest.mark.parametrize("function", [each if each in SAMPLE else thorough(each) for each in USES])
def test_groups_are_not_mixed_up(ranks, function):
    ranks.run(compare, function)
