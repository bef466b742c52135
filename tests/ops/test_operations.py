"""Fused operations against float64: any shape, layout, dtype and place, by the vendor's GEMM and by one kernel."""

from unittest import mock

import pytest
import torch
from ccl.calls import EVERYTHING
from covering import sample

from iris.ccl.config import ALL_REDUCE_VARIANTS
from iris.ops import FusedConfig
from iris.ops.call import Call
from iris.ops.cdna3 import arguments as cdna3
from iris.ops.copies import COPIED
from iris.ops.hopper import arguments
from iris.ops.hopper.arguments import Plan
from iris.simulator import ACTIVE
from ops.nearness import Product, Roundings, assert_as_near, through_torch, whole
from ops.plans import planned

RANKS = (1, 2, 3, 4, 5, 8) if EVERYTHING else (3,)
OPERATIONS = ("all_gather_matmul", "matmul_all_gather", "matmul_reduce_scatter", "matmul_all_reduce")
# Small tiles, so that small matrices have many.
SMALL = {"block_size_m": 16, "block_size_n": 16, "block_size_k": 32}
CONFIGS = {
    "vendor": None,
    "fused": FusedConfig(**SMALL),
    "copies": FusedConfig(variant="copies"),
    "few programs": FusedConfig(**SMALL, num_sms=2, comm_sms=1, group_size_m=2),
    "Hopper": FusedConfig(use_gluon=True, block_size_m=128, block_size_n=64, num_sms=3),
    "Hopper, wide": FusedConfig(use_gluon=True, block_size_m=128, block_size_n=256),
    "Hopper, deep": FusedConfig(use_gluon=True, block_size_m=128, block_size_n=128, block_size_k=128),
    "chiplets": FusedConfig(**SMALL, num_xcds=2, chunk_size=1, allow_tf32=False),
}
# M (a share of a rank, where rows are shared), N, K: multiples of tiles, and of nothing.
SHAPES = [(32, 32, 64), (1, 1, 1), (23, 37, 45), (50, 19, 70)]
# What the Gluon kernels take: N and K are multiples of 8. Tiles have 128 rows or more, so a few cases unless all run.
HOPPER_SHAPES = [(128, 64, 64), (15, 8, 8), (200, 96, 136), (300, 264, 72)]
HOPPER_CASES = [
    ((128, 64, 64), torch.bfloat16, "Hopper", "rows", "rows", "rows", False, False),
    ((15, 8, 8), torch.float16, "Hopper", "sliced", "columns", "columns", True, False),
    ((200, 96, 136), torch.bfloat16, "Hopper", "columns", "rows", "sliced", True, True),
    ((140, 264, 72), torch.float16, "Hopper, wide", "rows", "columns", "rows", False, True),
]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
LAYOUTS = ["rows", "columns", "sliced"]
# The layouts of A, B and the result; whether there is a bias; and whether the result is on the heap.
PLACES = [LAYOUTS, LAYOUTS, LAYOUTS, [False, True], [False, True]]
ROUNDS = 3 if EVERYTHING else 2


def place(rows, columns, dtype, layout, device, ctx=None):
    """Zeros by rows, by columns, or inside a larger matrix; on the heap of ``ctx``. And the larger one."""
    shape = {"rows": (rows, columns), "columns": (columns, rows), "sliced": (rows + 2, columns + 5)}[layout]
    whole = ctx.zeros(*shape, dtype=dtype) if ctx else torch.zeros(shape, dtype=dtype, device=device)
    return {"rows": whole, "columns": whole.t(), "sliced": whole[1:-1, 3:-2]}[layout], whole


def matrix(rows, columns, dtype, layout, seed, device, ctx=None):
    """Random, about 1 in size; laid out as `place` does."""
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    view, _ = place(rows, columns, dtype, layout, device, ctx)
    view.copy_(values)
    return view


def factors(kind, rows, columns, seed, device, begin):
    """Scales of A and B, as they are given: from that element on of a larger tensor."""
    generator = torch.Generator().manual_seed(seed)
    counts = {"none": (0, 0), "all": (1, 1), "A": (1, 0), "lines": (rows, columns), "columns": (1, columns)}[kind]
    return [0.5 + torch.rand(begin + n, generator=generator).to(device)[begin:] if n else None for n in counts]


def result_of(name, a, b, rank):
    """That of a rank, in float64, of everyone's matrices."""
    if name == "all_gather_matmul":
        return torch.cat(a).double() @ b[rank].double()
    products = [x.double() @ y.double() for x, y in zip(a, b, strict=True)]
    if name == "matmul_all_gather":
        return torch.cat(products)
    return sum(products).chunk(len(a))[rank] if name == "matmul_reduce_scatter" else sum(products)


def check(ctx, name, shape, dtype, config, *rest):
    return check_product(ctx, ctx.ops, ROUNDS, name, shape, dtype, CONFIGS[config], *rest)


def check_product(
    ctx, ops, rounds, name, shape, dtype, config, layout_a, layout_b, layout_out, biased, heap, result=None,
    scaled="none",
):  # fmt: skip
    """``result``: the dtype of the result, if not that of the matrices."""
    W, rank, result = ctx.num_ranks, ctx.cur_rank, result or dtype
    M, N, K = shape
    if name == "matmul_reduce_scatter":
        M *= W
    rows_out = {"all_gather_matmul": W * M, "matmul_all_gather": W * M, "matmul_reduce_scatter": M // W}.get(name, M)
    out, around = place(rows_out, N, result, layout_out, ctx.device, ctx if heap else None)
    rows = W * M if name == "all_gather_matmul" else M
    for call in range(rounds):
        a, b = (
            [matrix(*size, dtype, layout, 1000 * call + 2 * r + seed, ctx.device) for r in range(W)]
            for size, layout, seed in (((M, K), layout_a, 0), ((K, N), layout_b, 1))
        )
        # Every other call's scales and bias are not aligned to more than their elements.
        begin = call % 2
        scales = [factors(scaled, rows, N, 31 * call + r, ctx.device, begin) for r in range(W)]
        # Of a sum the ranks have the same bias, which is added once.
        bias = matrix(1, begin + N, result, "rows", 7 + call, ctx.device)[0, begin:] if biased else None
        scale_a, scale_b = scales[rank]
        getattr(ops, name)(out, a[rank], b[rank], bias, scale_a=scale_a, scale_b=scale_b, config=config)

        used = ops._check(Call(name, out, a[rank], b[rank], bias, scale_a, scale_b), config)
        products = [Product(*each, *lines) for *each, lines in zip(a, b, scales, strict=True)]
        if name == "all_gather_matmul":
            products = [Product(torch.cat(a), b[rank], scale_a, scale_b)]
        torchs = through_torch(name, products, bias, result, Roundings.of(name, used, ops._kernels.gluon is cdna3))
        exact = whole(name, [product.formed_in(torch.float64) for product in products])
        sizes = whole(name, [product.formed_in(torch.float64, torch.abs) for product in products])
        exact = exact if bias is None else exact + bias.double()
        if name == "matmul_reduce_scatter":
            exact, torchs = (each.chunk(W)[rank] for each in (exact, torchs))
        assert_as_near(out, exact, torchs, sizes, bits_of(dtype, used, ctx.device))
    # A result on the heap is not written by peers any more, and what lies around it never was.
    ctx.barrier()
    assert around.count_nonzero() == out.count_nonzero()
    return out.cpu().contiguous().view(torch.uint8) if name == "matmul_all_reduce" else None


def bits_of(dtype, config, device):
    """What products, or their sums, have while they are formed."""
    if device.type == "cuda" and dtype == torch.float32 and config.variant == "kernel" and config.allow_tf32:
        return 11
    # Hopper's tensor cores add up a few products of fp8 so.
    return 14 if device.type == "cuda" and dtype.itemsize == 1 else 24


def cases(name, hopper):
    """A sample in which every two values meet; also with every combination of tests, which would be 50 000 here."""
    if hopper and not EVERYTHING:
        return HOPPER_CASES
    if hopper:
        configs = ["Hopper", "Hopper, wide"]
        return sample(HOPPER_SHAPES, DTYPES[:2], configs, *PLACES)
    configs = [config for config in CONFIGS if "Hopper" not in config]
    if name not in COPIED:
        configs.remove("copies")
    return sample(SHAPES, DTYPES, configs, *PLACES)


@pytest.mark.ranks(*RANKS)
@pytest.mark.parametrize("hopper", [False, True], ids=["", "hopper"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_product(ranks, name, hopper):
    for case in cases(name, hopper):
        results = ranks.run(check, name, *case)
        assert results[0] is None or all(torch.equal(result, results[0]) for result in results)


# What cuBLAS takes of fp8, and what it does not.
FP8_SHAPES = [(32, 48, 64), (23, 37, 45), *([(1, 16, 32)] if EVERYTHING else [])]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
FNUZ = [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz] if ACTIVE or torch.version.hip else []
SCALED = ["A", "lines", *(["none", "all", "columns"] if EVERYTHING else [])]


def fp8_cases(name):
    configs, results = ["vendor", "fused", "chiplets"], [torch.bfloat16, torch.float32, torch.float16]
    dtypes = [*FP8, *FNUZ, torch.bfloat16] if EVERYTHING else [FP8[0], torch.bfloat16]
    cases = sample(FP8_SHAPES, dtypes, configs, *PLACES, results, SCALED)
    # All that cuBLAS takes is among them.
    return cases + [
        (shape, torch.float8_e4m3fn, config, layout_a, layout_b, layout_out, True, False, result, scaled)
        for shape, layout_a, layout_b, layout_out, result, scaled in (
            ((32, 48, 64), "rows", "columns", "rows", torch.bfloat16, "lines"),
            ((32, 48, 64), "sliced", "sliced", "sliced", torch.bfloat16, "columns"),
            ((17, 48, 64), "columns", "rows", "columns", torch.float32, "all"),
            ((17, 48, 64), "columns", "columns", "rows", torch.bfloat16, "lines"),
            ((32, 48, 64), "rows", "columns", "columns", torch.float16, "none"),
            ((1, 16, 32), "rows", "columns", "rows", torch.bfloat16, "lines"),
        )
        for config in ("vendor", *(["copies"] if name in COPIED else []))
    ]


# K is a multiple of 16 of fp8. Elsewhere than on Hopper the Gluon kernels are for other types.
FP8_HOPPER_SHAPES = [(128, 64, 64), (15, 24, 16), (200, 96, 144), (300, 264, 80)]
FP8_HOPPER_CASES = [
    ((128, 64, 64), FP8[0], "Hopper", "rows", "rows", "columns", False, False, torch.bfloat16, "none"),
    ((15, 24, 16), FP8[1], "Hopper", "sliced", "columns", "rows", True, False, torch.float16, "all"),
    ((200, 96, 144), FP8[0], "Hopper, deep", "columns", "columns", "rows", True, True, torch.bfloat16, "lines"),
    ((140, 264, 80), torch.bfloat16, "Hopper", "rows", "columns", "sliced", False, True, torch.bfloat16, "columns"),
]


def fp8_hopper_cases():
    if not EVERYTHING:
        return FP8_HOPPER_CASES
    configs, dtypes = ["Hopper", "Hopper, deep"], [*FP8, torch.bfloat16]
    axes = configs, *PLACES, DTYPES[:2], SCALED
    cases = sample(FP8_HOPPER_SHAPES, dtypes, *axes)
    return [case for case in cases if case[1].itemsize == 1 or case[1] == case[8]]


@pytest.mark.ranks(*RANKS)
@pytest.mark.parametrize("hopper", [False, True], ids=["", "hopper"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_product_of_fp8_and_with_scales(ranks, name, hopper):
    for case in fp8_hopper_cases() if hopper else fp8_cases(name):
        ranks.run(check, name, *case)


def odd_fp8(ctx, name, config):
    """Lines that are one and the same in memory; sums of nothing, whose bias is left; no columns, and a factor each."""
    W, rank, rows = ctx.num_ranks, ctx.cur_rank, 4 * ctx.num_ranks
    # Sums of nothing are not for TMA.
    for K, N in ((32, 16), (32, 0), *([] if config == "Hopper" else [(0, 16)])):
        a = [matrix(1, K, FP8[0], "rows", 10 + r, ctx.device).expand(rows, K) for r in range(W)]
        b = [matrix(K, 1, FP8[0], "rows", 50 + r, ctx.device).expand(K, N) for r in range(W)]
        bias = matrix(1, N, torch.bfloat16, "rows", 90 + K, ctx.device)[0]
        # The same on all ranks, and another one for each line: they are what results differ by.
        gathers = name == "all_gather_matmul"
        scale_a, scale_b = (torch.arange(1, n + 1, device=ctx.device) / 8 for n in (W * rows if gathers else rows, N))
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
    for config in ("vendor", "Hopper", *(["copies"] if name in COPIED else [])):
        ranks.run(odd_fp8, name, config)


def check_split(ctx, plan, *case):
    with planned(ctx, plan):
        check(ctx, *case)


# Of four tiles and more: the last one, some, into as many splits as programs and more.
@pytest.mark.ranks(*RANKS)
@pytest.mark.parametrize("plan", [Plan(2, 1), Plan(3, 3, paced=True), Plan(4, 2)], ids=str)
@pytest.mark.parametrize("name", ["all_gather_matmul", "matmul_all_gather"])
def test_tiles_split_along_k(ranks, name, plan):
    case = ((140, 96, 264), torch.float16, "Hopper", "rows", "columns", "rows", True, False)
    ranks.run(check_split, plan, name, *case)
    case = ((140, 96, 272), FP8[0], "Hopper", "rows", "columns", "columns", True, False, torch.float16, "lines")
    ranks.run(check_split, plan, name, *case)
    if EVERYTHING:
        case = ((300, 264, 328), torch.bfloat16, "Hopper, wide", "columns", "rows", "sliced", False, True)
        ranks.run(check_split, plan, name, *case)


def check_chunks(ctx, *case):
    with mock.patch.object(arguments, "LEAST_CHUNK_BYTES", 1):
        check(ctx, "all_gather_matmul", *case)


# Each rank has five tiles of rows, in chunks of two, two and one, of which the last has one row.
@pytest.mark.ranks(*RANKS)
def test_rows_that_are_sent_in_chunks(ranks):
    ranks.run(check_chunks, (513, 72, 64), torch.bfloat16, "Hopper", "rows", "columns", "rows", True, False)


def anywhere(ctx, name):
    """Results of which some lie on the heap, on some ranks, call by call: with no other rank's product to store."""
    size, rank = ctx.num_ranks, ctx.cur_rank
    gathers = name == "all_gather_matmul"
    rows, result = (23, (23 * size, 24)) if gathers else (23 * size, (23, 24))
    places = ctx.zeros(*result), torch.zeros(result, device=ctx.device)
    for config in (CONFIGS["chiplets"], CONFIGS["copies"]):
        for call in range(4):
            a, b = (
                [matrix(*shape, torch.float32, "rows", 100 * call + seed + r, ctx.device) for r in range(size)]
                for shape, seed in (((rows, 40), 0), ((40, 24), 50))
            )
            exact = result_of(name, a, b, rank)
            out = places[(call >> rank) % 2]
            getattr(ctx.ops, name)(out, a[rank], b[rank], config=config)
            torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", COPIED)
def test_ranks_keep_their_own_results_where_they_like(ranks, name):
    ranks.run(anywhere, name)


def far_apart(ctx):
    """B's rows begin 2^26 elements apart, so that the last of a block do 2^32 bytes behind the first and more."""
    depth, columns, step = 64, 16, 1 << 26
    b = torch.empty((depth - 1) * step + columns, dtype=torch.float16, device=ctx.device)
    b = b.as_strided((depth, columns), (step, 1))
    b.copy_(matrix(depth, columns, torch.float16, "rows", 9, ctx.device))
    a = [matrix(16, depth, torch.float16, "rows", seed, ctx.device) for seed in range(ctx.num_ranks)]
    out = torch.empty(16 * ctx.num_ranks, columns, dtype=torch.float16, device=ctx.device)
    ctx.ops.all_gather_matmul(out, a[ctx.cur_rank], b, config=FusedConfig(**SMALL | {"block_size_k": 64}))
    exact = torch.cat(a).double() @ b.double()
    torch.testing.assert_close(out.double(), exact, rtol=1e-2, atol=1e-2)


@pytest.mark.ranks(2)
def test_lines_that_begin_far_apart(ranks):
    ranks.run(far_apart)


def of_parameters(ctx, name):
    """Matrices with gradients are multiplied like others, whatever carries it, and the result has none."""
    size, rank = ctx.num_ranks, ctx.cur_rank
    a, b = (
        [matrix(*shape, torch.float32, "rows", 10 * seed + shape[1], ctx.device) for seed in range(size)]
        for shape in ((5 * size, 6), (6, 4))
    )
    exact = result_of(name, a, b, rank)
    out = torch.empty(exact.shape, device=ctx.device)
    for config in (CONFIGS["vendor"], CONFIGS["fused"], *([CONFIGS["copies"]] if name in COPIED else [])):
        getattr(ctx.ops, name)(out.zero_(), a[rank].requires_grad_(), b[rank].requires_grad_(), config=config)
        torch.testing.assert_close(out.double(), exact, rtol=1e-2, atol=1e-2)
        assert not out.requires_grad


@pytest.mark.parametrize("name", OPERATIONS)
def test_product_of_parameters(ranks, name):
    ranks.run(of_parameters, name)


def with_biases(ctx, name):
    """A bias is a vector as any other: a column, or one number for all. Whatever carries the call."""
    size, rank, (M, N) = ctx.num_ranks, ctx.cur_rank, (16 * ctx.num_ranks, 64)
    a, b = (
        [matrix(*shape, torch.bfloat16, "rows", 10 * seed + shape[1], ctx.device) for seed in range(size)]
        for shape in ((M, 64), (64, N))
    )
    exact = result_of(name, a, b, rank)
    out = torch.empty(exact.shape, dtype=torch.bfloat16, device=ctx.device)
    of_columns = torch.arange(2.0 * N, dtype=torch.bfloat16, device=ctx.device).view(N, 2)[:, 1]
    known = ["vendor", "fused", *(["copies"] if name in COPIED else [])]
    if torch.version.hip is None:
        known.append("Hopper")
    for bias in (of_columns, of_columns[3].expand(N), of_columns.float()[:, None].expand(N, 2)[:, 1]):
        for config in (None, *(CONFIGS[way] for way in known)):
            if bias.dtype != out.dtype and config is not None and config.variant != "kernel":
                continue  # which the vendor's GEMM does not add
            getattr(ctx.ops, name)(out.zero_(), a[rank], b[rank], bias, config=config)
            torch.testing.assert_close(out.double(), exact + bias.double(), rtol=1e-2, atol=1e-1)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_bias_lies_as_it_likes(ranks, name):
    ranks.run(with_biases, name)


def in_two_modes(ctx, way):
    """What a call leaves for the next ones can be written in training after an evaluation, and the other way round."""
    size, rank = ctx.num_ranks, ctx.cur_rank
    a = [matrix(128, 64, torch.bfloat16, "rows", seed, ctx.device) for seed in range(size)]
    b = matrix(64, 64, torch.bfloat16, "rows", 9, ctx.device)
    exact = torch.cat(a).double() @ b.double()
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            out = torch.empty(exact.shape, dtype=torch.bfloat16, device=ctx.device)
            ctx.ops.all_gather_matmul(out, a[rank], b, config=CONFIGS[way])
        torch.testing.assert_close(out.double(), exact, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("way", ["fused", "Hopper", "copies"])
def test_evaluation_and_training(ranks, way):
    if way == "Hopper" and torch.version.hip is not None:
        pytest.skip("Hopper's kernel")
    ranks.run(in_two_modes, way)


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


def of_no_rows(ctx):
    out, a, b = (torch.empty(shape, dtype=torch.bfloat16, device=ctx.device) for shape in ((0, 64), (0, 64), (64, 64)))
    workspace = ctx.ops.all_gather_matmul_preamble(out, a, b, config=CONFIGS["Hopper"])
    ctx.ops.all_gather_matmul(out, a, b, config=CONFIGS["Hopper"], workspace=workspace)
    ctx.barrier()
    workspace.close()


@pytest.mark.skipif(torch.version.hip is not None, reason="Hopper's kernel")
def test_a_product_of_no_rows_can_be_prepared(ranks):
    ranks.run(of_no_rows)


def sum_by(ctx, variant):
    generator = torch.Generator().manual_seed(5)
    a, b = (torch.randn(ctx.num_ranks, *shape, generator=generator).to(ctx.device) for shape in ((33, 40), (40, 24)))
    bias, out = torch.arange(24.0, device=ctx.device), torch.empty(33, 24, device=ctx.device)
    config = FusedConfig(all_reduce_variant=variant)
    for call in range(ROUNDS):
        ctx.ops.matmul_all_reduce(out, (1 + call) * a[ctx.cur_rank], b[ctx.cur_rank], bias, config=config)
        exact = (1 + call) * torch.bmm(a.double(), b.double()).sum(0) + bias
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-3)
    assert ctx.ops.matmul_all_reduce_preamble(out, a[0], b[0], config=config) is None


@pytest.mark.parametrize("variant", [name for name in ALL_REDUCE_VARIANTS if name != "two_shot"])
def test_sums_by_another_all_reduce(ranks, variant):
    ranks.run(sum_by, variant)
