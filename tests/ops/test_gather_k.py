"""all_gather_matmul(gather_dim="k"): A is split along K, so a product is a sum over what all ranks have of it."""

import pytest
import torch
from covering import EVERYTHING, covering

from iris.ccl.functional import name_of
from iris.errors import InvalidCollectiveError, InvalidConfigError, UnknownChoiceError
from iris.ops import FusedConfig, functional
from ops.products import CONFIGS, DTYPES, FP8, LAYOUTS, RANKS, ROUNDS, factors, matrix, place

WAYS = ["chosen", "fused", "few programs", "chiplets"]
# M, N, and the columns of A that a rank has.
SHAPES = [(32, 32, 64), (1, 1, 1), (23, 37, 45), (50, 19, 70)]


def operands(ctx, shape, dtype, layout_a, layout_b, call=0):
    """Every rank's A; and B, which is the same on all ranks."""
    (M, N, K), W = shape, ctx.num_ranks
    a = [matrix(M, K, dtype, layout_a, 1000 * call + r, ctx.device) for r in range(W)]
    return a, matrix(W * K, N, dtype, layout_b, 1000 * call + 77, ctx.device)


def check(ctx, shape, dtype, way, layout_a, layout_b, layout_out, biased, heap, scaled="none", result=None):
    """The sum of all is rounded once: to half a unit in the last place of the result, and what float32 sums lose."""
    (M, N, _), result = shape, result or dtype
    out, around = place(M, N, result, layout_out, ctx.device, ctx if heap else None)
    for call in range(ROUNDS):
        a, b = operands(ctx, shape, dtype, layout_a, layout_b, call)
        scale_a, scale_b = factors(scaled, M, N, 31 * call, ctx.device, call % 2)
        bias = matrix(1, N, result, "rows", 7 + call, ctx.device)[0] if biased else None
        ctx.ops.all_gather_matmul(
            out, a[ctx.cur_rank], b, bias, gather_dim="k", scale_a=scale_a, scale_b=scale_b, config=CONFIGS[way]
        )
        whole = torch.cat(a, 1).double()
        exact, size = whole @ b.double(), whole.abs() @ b.double().abs()
        for factor in (scale_a.double().view(-1, 1) if scale_a is not None else 1,
                       scale_b.double() if scale_b is not None else 1):  # fmt: skip
            exact, size = exact * factor, size * factor
        exact, size = (exact, size) if bias is None else (exact + bias.double(), size + bias.double().abs())
        tf32 = ctx.device.type == "cuda" and dtype == torch.float32 and way not in ("chosen", "chiplets")
        bits = 11 if tf32 else 14 if ctx.device.type == "cuda" and dtype in FP8 else 24
        rounding = torch.finfo(result).eps / 2
        wrong = (out.double() - exact).abs() > rounding * 1.01 * exact.abs() + size * 4 * 2.0**-bits + 1e-7
        assert not wrong.any(), (shape, dtype, way, (out.double() - exact).abs().max())
    ctx.barrier()
    assert around.count_nonzero() == out.count_nonzero()
    return out.cpu().contiguous().view(torch.uint8)


@pytest.mark.ranks(*RANKS)
def test_a_product_of_columns_is_rounded_once_and_alike_on_all_ranks(ranks):
    for case in covering(SHAPES, DTYPES, WAYS, LAYOUTS, LAYOUTS, LAYOUTS, [False, True], [False, True], ranks=ranks):
        results = ranks.run(check, *case)
        assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.ranks(*RANKS)
def test_products_of_fp8_with_scales(ranks):
    """A scale for each row of A is that of the whole row, on all ranks."""
    for scaled, dtype, result, way in covering(
        ["none", "all", "lines"], FP8, [torch.bfloat16, torch.float32], ["fused", "few programs"], ranks=ranks
    ):
        ranks.run(check, (23, 37, 48), dtype, way, "rows", "columns", "rows", True, False, scaled, result)


def prepared(ctx, way):
    a, b = operands(ctx, (23, 37, 45), torch.float32, "rows", "rows")
    mine, out = a[ctx.cur_rank], torch.empty(23, 37, device=ctx.device)
    workspace = ctx.ops.all_gather_matmul_preamble(out, mine, b, gather_dim="k", config=CONFIGS[way])
    for call in range(1, 4):
        ctx.ops.all_gather_matmul(out, call * mine, b, gather_dim="k", config=CONFIGS[way], workspace=workspace)
        torch.testing.assert_close(out.double(), call * torch.cat(a, 1).double() @ b.double(), rtol=1e-4, atol=1e-3)
    ctx.barrier()
    workspace.close()


def test_a_prepared_workspace(ranks):
    ranks.run(prepared, "chiplets")


def compare(ctx, compiler):
    """The operator, and its gradients: each rank weighs what it gets in its own way."""
    torch.compiler.reset()
    W, me, ranks = ctx.num_ranks, ctx.cur_rank, name_of(ctx)
    generator = torch.Generator().manual_seed(11)
    a, b, bias, weights = (
        [torch.randn(shape, generator=generator).to(ctx.device).requires_grad_(shape != (6, 5)) for _ in range(W)]
        for shape in ((6, 7), (7 * W, 5), (5,), (6, 5))
    )
    mine = [each[me].detach().clone().requires_grad_() for each in (a, b, bias)]

    def function(x, y, z):
        return functional.all_gather_matmul_k(torch.sin(x), y, z, ranks)

    result = (torch.compile(function, backend=compiler, fullgraph=True) if compiler else function)(*mine)
    expected = [torch.cat([torch.sin(x) for x in a], 1) @ y + z for y, z in zip(b, bias, strict=True)]
    torch.testing.assert_close(result, expected[me])
    (result * weights[me]).sum().backward()
    sum((each * weight).sum() for each, weight in zip(expected, weights, strict=True)).backward()
    torch.testing.assert_close([each.grad for each in mine], [each[me].grad for each in (a, b, bias)])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("compiler", [None, "aot_eager", *(["inductor"] if EVERYTHING else [])])
def test_the_operator_and_its_gradients(ranks, compiler):
    ranks.run(compare, compiler)


MISUSES = {
    "no such dimension": (UnknownChoiceError, r"gather_dim='n' is not possible; it takes one of 'm', 'k'"),
    "rows of B": (InvalidCollectiveError, r"all_gather_matmul\(gather_dim='k'\) of .*B needs as many rows as the A of"),
    "rows of out": (InvalidCollectiveError, r"all_gather_matmul\(gather_dim='k'\) of .*: out has to be \[32, 16\]"),
    "Gluon": (InvalidConfigError, r"all_gather_matmul\(gather_dim='k'\): its kernel is in Triton"),
    "workspace": (InvalidCollectiveError, r"workspace=5 is not what all_gather_matmul_preamble\(\) returned"),
    "copies": (InvalidConfigError, r"copies.*and not for all_gather_matmul\(gather_dim='k'\)"),
}


def misused(ctx, what):
    error, message = MISUSES[what]
    W = ctx.num_ranks
    out, a = ctx.zeros(32 * (W + 1 if what == "rows of out" else 1), 16), ctx.zeros(32, 16)
    b = ctx.zeros(16 * W + (what == "rows of B"), 16)
    config = {"Gluon": FusedConfig(use_gluon=True), "copies": FusedConfig(variant="copies")}.get(what)
    with pytest.raises(error, match=message):
        options = {"workspace": 5} if what == "workspace" else {"config": config}
        ctx.ops.all_gather_matmul(out, a, b, gather_dim="n" if "such" in what else "k", **options)


@pytest.mark.parametrize("what", MISUSES)
def test_what_does_not_fit_is_told(ranks, what):
    ranks.run(misused, what)
