"""Products of fp8, and products with scales, by each way that there is."""

import pytest
import torch
from covering import EVERYTHING, SAMPLED, sample, thorough

from iris.ops.copies import COPIED
from iris.simulator import ACTIVE
from ops.products import CONFIGS, DTYPES, FP8, OPERATIONS, PLACES, PRODUCTS, RANKS, check, matrix, result_of

# What cuBLAS takes of fp8, and what it does not.
FP8_SHAPES = [(32, 48, 64), (23, 37, 45), *([(1, 16, 32)] if EVERYTHING else [])]
FNUZ = [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz] if ACTIVE or torch.version.hip else []
SCALED = ["A", "lines", *(["none", "all", "columns"] if EVERYTHING else [])]


def by_copies(name, by_lines):
    """Those whose GEMM is torch's: on the CPU, an older one has no scales of lines."""
    return ["copies"] if name in COPIED and not (by_lines and ACTIVE and torch.__version__ < (2, 13)) else []


def fp8_cases(name):
    configs, results = ["chosen", "fused", "chiplets"], [torch.bfloat16, torch.float32, torch.float16]
    dtypes = [*FP8, *FNUZ, torch.bfloat16] if EVERYTHING else [FP8[0], torch.bfloat16]
    cases = sample(FP8_SHAPES, dtypes, configs, *PLACES, results, SCALED)
    # All that cuBLAS takes is among them, and in the sample half of it.
    return cases + [
        (shape, torch.float8_e4m3fn, config, layout_a, layout_b, layout_out, True, False, result, scaled)
        for shape, layout_a, layout_b, layout_out, result, scaled in [
            ((32, 48, 64), "rows", "columns", "rows", torch.bfloat16, "lines"),
            ((32, 48, 64), "sliced", "sliced", "sliced", torch.bfloat16, "columns"),
            ((17, 48, 64), "columns", "rows", "columns", torch.float32, "all"),
            ((17, 48, 64), "columns", "columns", "rows", torch.bfloat16, "lines"),
            ((32, 48, 64), "rows", "columns", "columns", torch.float16, "none"),
            ((1, 16, 32), "rows", "columns", "rows", torch.bfloat16, "lines"),
        ][:: 2 if SAMPLED else 1]
        for config in ("chosen", *by_copies(name, scaled in ("lines", "columns")))
    ]


# K is a multiple of 16 of fp8. Elsewhere than on Hopper the Gluon kernels are for other types.
FP8_HOPPER_SHAPES = [(128, 64, 64), (15, 24, 16), (200, 96, 144), (300, 264, 80)]
FP8_HOPPER_CASES = [
    ((128, 64, 64), FP8[0], "Hopper", "rows", "rows", "columns", False, False, torch.bfloat16, "none"),
    ((15, 24, 16), FP8[1], "Hopper", "sliced", "columns", "rows", True, False, torch.float16, "all"),
    ((100, 96, 144), FP8[0], "Hopper, deep", "columns", "columns", "rows", True, True, torch.bfloat16, "lines"),
    ((140, 264, 80), torch.bfloat16, "Hopper", "rows", "columns", "sliced", False, True, torch.bfloat16, "columns"),
]


def fp8_hopper_cases():
    if not EVERYTHING:
        return FP8_HOPPER_CASES
    configs, dtypes = ["Hopper", "Hopper, deep"], [*FP8, torch.bfloat16]
    axes = configs, *PLACES, DTYPES[:2], SCALED
    cases = sample(FP8_HOPPER_SHAPES, dtypes, *axes)
    return [case for case in cases if case[1].itemsize == 1 or case[1] == case[8]]


# What runs the kernels of another one, with the same dtypes.
ALIKE = [("matmul_reduce_scatter", True), ("matmul_all_reduce", False)]


@pytest.mark.ranks(*(RANKS if EVERYTHING else (2,)))
@pytest.mark.parametrize(("name", "hopper"), [thorough(*each) if each in ALIKE else each for each in PRODUCTS], ids=str)
def test_product_of_fp8_and_with_scales(ranks, name, hopper):
    for case in fp8_hopper_cases() if hopper else fp8_cases(name):
        ranks.run(check, name, *case)


def odd_fp8(ctx, name, config):
    """Lines that are one and the same in memory; sums of nothing, whose bias is left; no columns; factors with gaps."""
    W, rank, rows = ctx.num_ranks, ctx.cur_rank, 4 * ctx.num_ranks
    # Sums of nothing are not for TMA.
    for K, N in ((32, 16), (32, 0), *([] if config == "Hopper" else [(0, 16)])):
        a = [matrix(1, K, FP8[0], "rows", 10 + r, ctx.device).expand(rows, K) for r in range(W)]
        b = [matrix(K, 1, FP8[0], "rows", 50 + r, ctx.device).expand(K, N) for r in range(W)]
        bias = matrix(1, N, torch.bfloat16, "rows", 90 + K, ctx.device)[0]
        # The same on all ranks, and another one for each line: they are what results differ by.
        gathers = name == "all_gather_matmul"
        lengths = (W * rows if gathers else rows, N)
        scale_a, scale_b = ((torch.arange(2, 2 * n + 2, device=ctx.device) / 16)[::2] for n in lengths)
        of_a = scale_a.chunk(W) if gathers else W * [scale_a]
        scaled = [x.double() * line[:, None] for x, line in zip(a, of_a, strict=True)]
        columns = [y.double() * scale_b for y in b]
        exact = result_of(name, scaled, columns, rank) + bias.double()
        # What parts, sums and biases are rounded to, element by element: less than what neighbours differ by.
        largest = result_of(name, [x.abs() for x in scaled], [y.abs() for y in columns], rank) + bias.double().abs()
        out = torch.full(exact.shape, 7.0, dtype=torch.bfloat16, device=ctx.device)
        options = {"scale_a": scale_a, "scale_b": scale_b, "config": CONFIGS[config]}
        getattr(ctx.ops, name)(out, a[rank], b[rank], bias, **options)
        assert ((out.double() - exact).abs() <= 2**-7 * largest).all()


@pytest.mark.parametrize("name", OPERATIONS)
def test_odd_products_of_fp8(ranks, name):
    for config in ("chosen", "Hopper", *by_copies(name, by_lines=True)):
        ranks.run(odd_fp8, name, config)


def in_another_default(ctx):
    """Factors are float32, whatever torch makes of numbers; with one for A alone, for its rows, and with none."""
    fp8 = torch.float8_e4m3fnuz if torch.version.hip else torch.float8_e4m3fn
    a = torch.arange(16 * 32, dtype=torch.float32, device=ctx.device).view(16, 32).remainder(7).to(fp8)
    b = torch.arange(16 * 32, dtype=torch.float32, device=ctx.device).view(16, 32).remainder(5).to(fp8).t()
    rows, out = torch.arange(1.0, 17, device=ctx.device), torch.empty(16, 16, dtype=torch.bfloat16, device=ctx.device)
    torch.set_default_dtype(torch.bfloat16)
    try:
        for scale in (None, rows[2], rows[:, None]):
            ctx.ops.matmul_all_reduce(out, a, b, scale_a=scale)
            exact = ctx.num_ranks * (a.double() @ b.double()) * (1 if scale is None else scale.double())
            torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=0)
    finally:
        torch.set_default_dtype(torch.float32)


def test_fp8_where_torch_has_another_default_dtype(ranks):
    ranks.run(in_another_default)
