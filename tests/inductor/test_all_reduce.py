"""Products and their sums in compiled graphs; and what has to stay as it is, with the reason in the report."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from covering import EVERYTHING
from torch.nn import functional as F

from inductor.megatron import Sum, SumOfGradients
from inductor.searched import FusionReport, compiled, expect

M, K, N = 6, 16, 24


def values(ctx, dtype=torch.float32, shape=(M, K), turn=0):
    """Each rank's A, B and bias."""
    generator = torch.Generator().manual_seed(3 + turn)
    W = ctx.num_ranks
    a, b, bias = (torch.randn(W, *each, generator=generator).to(dtype) for each in (shape, (K, N), (N,)))
    return a.to(ctx.device), b.to(ctx.device), bias.to(ctx.device)


def compare_products(ctx, dtype, shape):
    group, report = dist.new_group(backend="cuda:iris"), FusionReport()

    def row_parallel(x, weight):
        y = F.linear(x, weight)
        dist.all_reduce(y, group=group)
        return y + 1

    run, tolerance = compiled(row_parallel, report), 4 * torch.finfo(dtype).eps
    with torch.no_grad():
        for turn in range(3):
            a, b, _ = values(ctx, dtype, shape, turn)
            result = run(a[ctx.cur_rank], b[ctx.cur_rank].t().contiguous())
            total = sum(x.double() @ y.double() for x, y in zip(a, b, strict=True))
            torch.testing.assert_close(result, total + 1, rtol=tolerance, atol=8 * tolerance, check_dtype=False)
    expect(report, {"product + all_reduce": 1})


@pytest.mark.ranks(*((1, 2, 4) if EVERYTHING else (2,)))
@pytest.mark.parametrize("shape", [(M, K), (2, 3, K)], ids=["matrix", "tokens"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_sum_of_products_is_one_operator(ranks, dtype, shape):
    ranks.run(compare_products, dtype, shape)


def compare_gradients(ctx):
    group, report = dist.new_group(backend="cuda:iris"), FusionReport()

    def mlp(x, up, down):
        return Sum.apply(torch.tanh(SumOfGradients.apply(x, group) @ up) @ down, group)

    a, b, _ = values(ctx)
    results = []
    for run in (compiled(mlp, report), compiled(mlp)):
        given = [each.clone().requires_grad_() for each in (a[0], b[ctx.cur_rank], b[ctx.cur_rank].t().contiguous())]
        out = run(*given)
        out.sin().sum().backward()
        results.append([out, *(each.grad for each in given)])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    expect(report, {"product + all_reduce": 2})


@pytest.mark.ranks(2)
def test_products_of_forward_and_backward(ranks):
    ranks.run(compare_gradients)


def total(x, group, op="sum"):
    return funcol.all_reduce(x, op, group)


def used_twice(a, b, bias, group):
    y = a @ b
    return total(y, group) + y


def reshaped_and_used_twice(a, b, bias, group):
    y = (a @ b).view(2, -1, N)
    return total(y, group) * y.sin()


def largest(a, b, bias, group):
    return total(a @ b, group, "max")


def with_bias(a, b, bias, group):
    return total(torch.addmm(bias, a, b), group)


def of_no_product(a, b, bias, group):
    return total(torch.tanh(a @ b), group)


def of_an_input(a, b, bias, group):
    return total(a, group) @ b


def columns(a, b, bias, group):
    return total((a @ b)[:, : N // 2], group)


def transposed(a, b, bias, group):
    return total((a @ b).t().contiguous(), group)


def doubles(a, b, bias, group):
    return total(a.double() @ b.double(), group)


LEFT = {
    used_twice: "the product is used elsewhere",
    reshaped_and_used_twice: "the product is used elsewhere",
    largest: "the reduction is 'max'",
    with_bias: "aten.addmm",
    of_no_product: "aten.tanh",
    of_an_input: "an input of the graph",
    columns: "aten.slice",
    transposed: "aten.clone",
    doubles: "the product is torch.float64",
}


def stays(ctx, function):
    group, report = dist.new_group(backend="cuda:iris"), FusionReport()
    a, b, bias = (each[ctx.cur_rank] for each in values(ctx))
    with torch.no_grad():
        result = compiled(lambda *given: function(*given, group), report)(a, b, bias)
        torch.testing.assert_close(result, function(a, b, bias, group))
    expect(report, {}, LEFT[function])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("function", LEFT)
def test_what_is_no_sum_of_a_product_alone_stays(ranks, function):
    ranks.run(stays, function)
