"""Sums and norms in compiled graphs: each way to write a norm is found, and computes the same with its gradients."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from covering import EVERYTHING, thorough
from torch.nn import functional as F

from inductor.megatron import Sum
from inductor.searched import FusionReport, compiled, expect
from iris.compat.inductor import c10d
from iris.inductor import nodes, rms_norm
from iris.ops.norm_call import MOST_COLUMNS

ROWS, H, EPS = (2, 3), 32, 1e-5


def of_torch(x, weight):
    return F.rms_norm(x, (H,), weight, EPS)


def weight_last(x, weight):
    """As transformers has it in its Llama and most others: rounded before it is multiplied."""
    wide = x.to(torch.float32)
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def one_more(x, weight):
    """As Gemma has it: the weight is what is added to 1."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * (1.0 + (weight.float() - 1))).type_as(x)


def by_products(x, weight):
    wide = x.float()
    return (torch.rsqrt((wide * wide).mean(-1, keepdim=True) + EPS) * wide).to(x.dtype) * weight


NORMS = [of_torch, weight_last, one_more, by_products]


def in_place(x, group):
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


def functional(x, group):
    return funcol.all_reduce(x, "sum", group)


def rows_of_tokens(x, group):
    """Reshaped around the sum, as products of matrices are."""
    return funcol.all_reduce(x.view(-1, H), "sum", group).view(x.shape)


SUMS = [in_place, functional, rows_of_tokens]


def values(ctx, dtype, turn):
    """Each rank's part, and the residual and weight of all."""
    generator = torch.Generator().manual_seed(turn)
    parts = torch.randn(ctx.num_ranks, *ROWS, H, generator=generator).to(dtype)
    residual, weight = torch.randn(*ROWS, H, generator=generator).to(dtype), (1 + torch.rand(H, generator=generator))
    return (each.to(ctx.device) for each in (parts, residual, weight.to(dtype)))


def reference(parts, residual, weight):
    """The normalised sum and the sum, in float64."""
    x = parts.double().sum(0) + (0 if residual is None else residual.double())
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.double(), x


def compare(ctx, norm, add_up, dtype, with_residual):
    group, report = dist.new_group(backend="cuda:iris"), FusionReport()

    def layer(part, residual, weight):
        x = add_up(part, group)
        if residual is None:
            return norm(x, weight) * 2
        x = residual + x
        return norm(x, weight) * 2, x

    fused = compiled(layer, report)
    tolerance = 3 * torch.finfo(dtype).eps
    with torch.no_grad():
        for turn in range(3):
            parts, residual, weight = values(ctx, dtype, turn)
            kept = residual.clone()
            given = (parts[ctx.cur_rank], residual if with_residual else None, weight)
            result = fused(*given)
            out, x = reference(parts, given[1], weight)
            near = dict(rtol=tolerance, atol=tolerance * ctx.num_ranks, check_dtype=False)
            torch.testing.assert_close(result[0] if with_residual else result, 2 * out, **near)
            if with_residual:
                torch.testing.assert_close(result[1], x, **near)
            assert torch.equal(residual, kept)
    pattern = "all_reduce + residual + RMSNorm" if with_residual else "all_reduce + RMSNorm"
    expect(report, {pattern: 1})


@pytest.mark.ranks(*((1, 2, 4) if EVERYTHING else (2,)))
@pytest.mark.parametrize("with_residual", [True, False], ids=["residual", "alone"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("add_up", SUMS)
@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_of_a_sum_is_one_operator(ranks, norm, add_up, dtype, with_residual):
    ranks.run(compare, norm, add_up, dtype, with_residual)


def compare_gradients(ctx, norm):
    """Of two norms one after the other with a product between, as in a layer; weights and parts differ by rank."""
    group, report = dist.new_group(backend="cuda:iris"), FusionReport()

    def layer(part, residual, weight, up):
        x = residual + Sum.apply(part, group)
        x = x + Sum.apply(torch.tanh(norm(x, weight) @ up), group)
        return norm(x, weight), x

    parts, residual, weight = values(ctx, torch.float32, 5)
    up = torch.randn(H, H, generator=torch.Generator().manual_seed(ctx.cur_rank)).to(ctx.device) / 8
    results = []
    for run in (compiled(layer, report), compiled(layer)):
        given = [each.clone().requires_grad_() for each in (parts[ctx.cur_rank], residual, weight, up)]
        out, x = run(*given)
        ((out * (1 + ctx.cur_rank)).sin().sum() + x.square().mean()).backward()
        results.append([out, x, *(each.grad for each in given)])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    expect(report, {"all_reduce + residual + RMSNorm": 2})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("norm", [NORMS[0], *map(thorough, NORMS[1:])])
def test_gradients_are_those_without_the_operator(ranks, norm):
    ranks.run(compare_gradients, norm)


def parts_of_one(part, weight):
    """What is summed, and the residual, in which every row but one is a row of it."""
    both = torch.tanh(part)
    return both[:-1], both[1:], weight


def the_same(part, weight):
    both = torch.tanh(part)
    return both, both, weight


def a_weight_that_is_a_row(part, weight):
    """Of a sum that has but one."""
    weight = torch.tanh(weight)
    return part[:1], weight[None], weight


def compare_shared(ctx, given, quantise):
    group, report = dist.new_group(backend="cuda:iris"), FusionReport()

    def layer(part, weight):
        part, residual, weight = given(part, weight)
        x = residual + functional(part, group)
        normed = of_torch(x, weight)
        return (*by_token(normed), x) if quantise else (normed * 2, x)

    parts, _, weight = values(ctx, torch.float32, 9)
    part = parts[ctx.cur_rank].flatten(0, 1)
    with torch.no_grad():
        results, expected = compiled(layer, report)(part, weight), layer(part, weight)
    for result, exact in zip(results, expected, strict=True):
        tolerance = 0.15 if result.dtype == FP8 else 1e-4
        torch.testing.assert_close(result.float(), exact.float(), rtol=tolerance, atol=tolerance)
    expect(report, {"all_reduce + residual + RMSNorm" + " + fp8" * quantise: 1})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("quantise", [False, True])
@pytest.mark.parametrize("given", [parts_of_one, the_same, a_weight_that_is_a_row])
def test_a_residual_may_share_memory_with_what_is_read(ranks, given, quantise):
    """The operator writes over it."""
    ranks.run(compare_shared, given, quantise)


FP8 = torch.float8_e4m3fn


def by_token(rows):
    """As torchao writes it."""
    scale = rows.abs().amax(-1, keepdim=True).to(torch.float32).clamp(min=1e-12) / 448.0
    return (rows.to(torch.float32) / scale).clamp(-448.0, 448.0).to(FP8), scale


def of_wide_rows(rows):
    wide = rows.float()
    scale = (wide.abs().amax(dim=-1, keepdim=True) * (1 / 448.0)).clamp(min=1e-14)
    return (wide / scale).to(FP8), scale


def with_rows_besides(rows):
    narrow, scale = by_token(rows)
    return narrow, scale, rows


def by_tensor(rows):
    scale = rows.abs().amax().float().clamp(min=1e-12) / 448.0
    return (rows.float() / scale).to(FP8), scale


def without_bound(rows):
    """A row of zeros becomes one of NaN."""
    scale = rows.abs().amax(-1, keepdim=True).float() / 448.0
    return (rows.float() / scale).to(FP8), scale


def cut_off(rows):
    scale = rows.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / 448.0
    return (rows.float() / scale).clamp(-240.0, 240.0).to(FP8), scale


# Whether the rows become fp8 in the operator.
QUANTISED = {by_token: True, of_wide_rows: True}
QUANTISED |= dict.fromkeys([with_rows_besides, by_tensor, without_bound, cut_off], False)


def compare_quantised(ctx, quantise, norm, with_residual):
    group, report = dist.new_group(backend="cuda:iris"), FusionReport()

    def layer(part, residual, weight):
        x = functional(part, group)
        if residual is None:
            return quantise(norm(x, weight))
        x = residual + x
        return *quantise(norm(x, weight)), x

    fused = compiled(layer, report)
    with torch.no_grad():
        for turn in range(2):
            parts, residual, weight = values(ctx, torch.bfloat16, turn)
            given = residual if with_residual else None
            narrow, scale, *rest = fused(parts[ctx.cur_rank], given, weight)
            out, x = reference(parts, given, weight)
            assert narrow.dtype == FP8 and scale.dtype == torch.float32
            if quantise is not cut_off:
                # Half of the distance between two numbers of fp8, beside what bf16 rounds.
                torch.testing.assert_close(narrow.double() * scale, out, rtol=1 / 16 + 0.02, atol=0.02)
            if with_residual:
                torch.testing.assert_close(rest[-1].double(), x, rtol=0.02, atol=0.02)
            if QUANTISED[quantise]:
                torch.testing.assert_close(scale.double(), out.abs().amax(-1, keepdim=True) / 448, rtol=0.02, atol=0)
    pattern = "all_reduce + residual + RMSNorm" if with_residual else "all_reduce + RMSNorm"
    expect(report, {pattern + " + fp8" * QUANTISED[quantise]: 1})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("with_residual", [True, False], ids=["residual", "alone"])
@pytest.mark.parametrize(
    ("quantise", "norm"),
    [
        (by_token, of_torch),
        (of_wide_rows, weight_last),
        (without_bound, of_torch),
        *(thorough(each, of_torch) for each in (with_rows_besides, by_tensor, cut_off)),
    ],
)
def test_rows_that_become_fp8(ranks, quantise, norm, with_residual):
    ranks.run(compare_quantised, quantise, norm, with_residual)


def weighted(total, weight, mean, eps):
    wide = total.float()
    return (wide * torch.rsqrt(mean(wide.square()) + eps) * weight).to(total.dtype)


def of_columns(total, weight):
    return weighted(total, weight, lambda squares: squares.mean(-2, keepdim=True), EPS)


def of_another_eps(total, weight):
    return weighted(total, weight, lambda squares: torch.add(squares.mean(-1, keepdim=True), EPS, alpha=2), 0)


def used_besides(total, weight):
    return of_torch(total, weight) + total


def without_weight(total, weight):
    return F.rms_norm(total, (H,), None, EPS)


def with_an_extent(total, weight):
    return of_torch(total, weight) * total.shape[1]


def after_an_extent(total, weight):
    return of_torch(total + total.shape[1], weight)


STAYS = [of_columns, of_another_eps, used_besides, without_weight, after_an_extent]


def compare_others(ctx, function):
    group, report = dist.new_group(backend="cuda:iris"), FusionReport()

    def layer(part, weight):
        return function(funcol.all_reduce(part, "sum", group), weight)

    parts, _, weight = values(ctx, torch.float32, 7)
    with torch.no_grad():
        result = compiled(layer, report, dynamic=True)(parts[ctx.cur_rank], weight)
        torch.testing.assert_close(result, layer(parts[ctx.cur_rank], weight), rtol=1e-4, atol=1e-5)
    assert report.fused("all_reduce + RMSNorm") == (function not in STAYS), str(report)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("function", [*STAYS, with_an_extent])
def test_what_is_no_such_norm_stays(ranks, function):
    ranks.run(compare_others, function)


def test_a_row_that_no_kernel_holds_stays():
    graph = torch.fx.Graph()
    part, weight = graph.placeholder("part"), graph.placeholder("weight")
    wide = [torch.empty(2, MOST_COLUMNS + 1, device=nodes.DEVICE), torch.empty(MOST_COLUMNS + 1, device="meta")]
    part.meta["val"], weight.meta["val"] = wide
    all_reduce = graph.call_function(c10d.all_reduce.default, (part, "sum", "0"))
    total = rms_norm.ReducedSum(all_reduce, part, part, None, part)
    assert f"{MOST_COLUMNS} is the most" in rms_norm._why_not_fused(total, rms_norm.Norm(weight, EPS, part))
