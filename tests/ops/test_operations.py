"""Fused operations against float64: any shape, layout, dtype and place, by the vendor's GEMM and by one kernel."""

import itertools
from unittest import mock

import pytest
import torch
from covering import EVERYTHING, SAMPLED, sample, thorough

from iris.ccl.config import ALL_REDUCE_VARIANTS
from iris.ops import FusedConfig
from iris.ops.copies import COPIED
from iris.ops.hopper.arguments import Plan
from ops.plans import planned, short_chunks
from ops.products import (
    CONFIGS,
    DTYPES,
    FP8,
    OPERATIONS,
    PLACES,
    PRODUCTS,
    RANKS,
    ROUNDS,
    SMALL,
    check,
    matrix,
    result_of,
)

# M (a share of a rank, where rows are shared), N, K: multiples of tiles, and of nothing.
SHAPES = [(32, 32, 64), (1, 1, 1), (23, 37, 45), (50, 19, 70)]
# What the Gluon kernels take: N and K are multiples of 8. Tiles have 128 rows or more, so four cases unless all run.
# Of one row, all ranks but one have none to add up.
HOPPER_SHAPES = [(128, 64, 64), (47, 8, 8), (1, 72, 40), (200, 96, 136), (300, 264, 72)]
HOPPER_CASES = [
    ((128, 64, 64), torch.bfloat16, "Hopper", "rows", "rows", "rows", False, False),
    ((47, 8, 8), torch.float16, "Hopper", "sliced", "columns", "columns", True, False),
    ((1, 72, 40), torch.bfloat16, "Hopper", "rows", "rows", "sliced", True, True),
    ((140, 264, 72), torch.float16, "Hopper, wide", "columns", "sliced", "rows", False, True),
]


def cases(name, hopper):
    """A sample in which every two values meet; also with every combination of tests, which would be 50 000 here."""
    if hopper and not EVERYTHING:
        return HOPPER_CASES[SAMPLED:]  # whole tiles are among the cases of `test_fp8`
    if hopper:
        configs = ["Hopper", "Hopper, wide"]
        return sample(HOPPER_SHAPES, DTYPES[:2], configs, *PLACES)
    configs = [config for config in CONFIGS if "Hopper" not in config]
    if name not in COPIED:
        configs.remove("copies")
    return sample(SHAPES, DTYPES, configs, *PLACES)


@pytest.mark.ranks(*RANKS)
@pytest.mark.parametrize(("name", "hopper"), PRODUCTS, ids=str)
def test_product(ranks, name, hopper):
    for case in cases(name, hopper):
        results = ranks.run(check, name, *case)
        assert results[0] is None or all(torch.equal(result, results[0]) for result in results)


def check_split(ctx, plan, *case):
    with planned(ctx, plan):
        check(ctx, *case)


# Of four tiles and more: the last one, some, into as many splits as programs and more.
@pytest.mark.ranks(*(RANKS if EVERYTHING else (2,)))
@pytest.mark.parametrize("plan", [Plan(2, 1), Plan(3, 3, paced=True), Plan(4, 2)], ids=str)
@pytest.mark.parametrize("name", ["all_gather_matmul", "matmul_all_gather"])
def test_tiles_split_along_k(ranks, name, plan):
    case = ((140, 96, 264), torch.float16, "Hopper", "rows", "columns", "rows", True, False)
    ranks.run(check_split, plan, name, *case)
    if plan.paced or not SAMPLED:
        case = ((140, 96, 272), FP8[0], "Hopper", "rows", "columns", "columns", True, False, torch.float16, "lines")
        ranks.run(check_split, plan, name, *case)
    if EVERYTHING:
        case = ((300, 264, 328), torch.bfloat16, "Hopper, wide", "columns", "rows", "sliced", False, True)
        ranks.run(check_split, plan, name, *case)


def check_chunks(ctx, plan, *case):
    with short_chunks(), planned(ctx, plan):
        check(ctx, "all_gather_matmul", *case)


# Each rank has five tiles of rows, in chunks of two, two and one, of which the last has one row. To all peers but one
# so many of these go together.
@pytest.mark.thorough  # rounds of them are played under the sanitizer
@pytest.mark.ranks(*RANKS)
@pytest.mark.parametrize("together", [1, 2])
def test_rows_that_are_sent_in_chunks(ranks, together):
    case = ((513, 72, 64), torch.bfloat16, "Hopper", "rows", "columns", "rows", True, False)
    ranks.run(check_chunks, Plan(together=together), *case)


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
    """B's rows begin 2^26 elements apart, so that the last of a block do 2^32 bytes after the first and more."""
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


def small(ctx, name):
    """Room for the result, this rank's A and B, other numbers on each, and the result in float64."""
    a, b = (
        [matrix(*shape, torch.float32, "rows", 10 * seed + shape[1], ctx.device) for seed in range(ctx.num_ranks)]
        for shape in ((5 * ctx.num_ranks, 6), (6, 4))
    )
    exact = result_of(name, a, b, ctx.cur_rank)
    return torch.empty(exact.shape, device=ctx.device), a[ctx.cur_rank], b[ctx.cur_rank], exact


def of_parameters(ctx, name):
    """Matrices with gradients are multiplied like others, whatever carries it, and the result has none."""
    out, a, b, exact = small(ctx, name)
    for config in (CONFIGS["chosen"], CONFIGS["fused"], *([CONFIGS["copies"]] if name in COPIED else [])):
        getattr(ctx.ops, name)(out.zero_(), a.requires_grad_(), b.requires_grad_(), config=config)
        torch.testing.assert_close(out.double(), exact, rtol=1e-2, atol=1e-2)
        assert not out.requires_grad


@pytest.mark.parametrize("name", OPERATIONS)
def test_product_of_parameters(ranks, name):
    ranks.run(of_parameters, name)


def over_what_a_graph_needs(ctx, name):
    """A buffer that is used again before backward: autograd says so, whatever has carried the call."""
    size, rows = ctx.num_ranks, 5 * ctx.num_ranks
    a, b = torch.ones(rows, 6, device=ctx.device), torch.ones(6, 4, device=ctx.device)
    shape = result_of(name, [a] * size, [b] * size, 0).shape
    for out in (ctx.empty(shape), torch.empty(shape, device=ctx.device)):
        for config in (
            FusedConfig(variant="vendor"),
            CONFIGS["fused"],
            *([CONFIGS["copies"]] if name in COPIED else []),
        ):
            getattr(ctx.ops, name)(out, a, b, config=config)
            loss = (torch.ones_like(out).requires_grad_() * out).sum()
            getattr(ctx.ops, name)(out, a, b, config=config)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
    with torch.inference_mode():
        getattr(ctx.ops, name)(torch.empty(shape, device=ctx.device), a, b)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_result_over_what_a_graph_needs(ranks, name):
    ranks.run(over_what_a_graph_needs, name)


def with_another_sign(ctx, name):
    """The imaginary part of a conjugate lies in memory with the other sign, and only torch knows."""
    out, a, b, exact = small(ctx, name)
    for config in (FusedConfig(variant="vendor"), CONFIGS["fused"], *([CONFIGS["copies"]] if name in COPIED else [])):
        negated_a, negated_b = (torch.complex(torch.zeros_like(x), -x).conj().imag for x in (a, b))
        assert negated_a.is_neg() and negated_b.is_neg()
        for read in ((negated_a, b), (a, negated_b)):
            getattr(ctx.ops, name)(out.zero_(), *read, config=config)
            torch.testing.assert_close(out.double(), exact, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", OPERATIONS)
def test_product_of_what_is_read_with_another_sign(ranks, name):
    ranks.run(with_another_sign, name)


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
    # Each rank's part of a sum is rounded, by an eighth at most; the biases of two columns differ by 2.
    near = 0.1 if "gather" in name else size / 8
    known = ["chosen", "fused", *(["copies"] if name in COPIED else [])]
    if torch.version.hip is None:
        known.append("Hopper")
    for bias in (of_columns, of_columns[3].expand(N), of_columns.float()[:, None].expand(N, 2)[:, 1]):
        for config in (FusedConfig(variant="vendor"), *(CONFIGS[way] for way in known)):
            if bias.dtype != out.dtype and config is not None and config.variant != "kernel":
                continue  # which the vendor's GEMM does not add
            getattr(ctx.ops, name)(out.zero_(), a[rank], b[rank], bias, config=config)
            torch.testing.assert_close(out.double(), exact + bias.double(), rtol=1e-2, atol=near)


@pytest.mark.parametrize("name", [*OPERATIONS[:2], *map(thorough, OPERATIONS[2:])])
def test_a_bias_lies_as_it_likes(ranks, name):
    ranks.run(with_biases, name)


def in_two_modes(ctx, way):
    """What a call leaves for the next ones can be written in training after an evaluation, and the other way round."""
    size, rank = ctx.num_ranks, ctx.cur_rank
    a = [matrix(128, 64, torch.bfloat16, "rows", seed, ctx.device) for seed in range(size)]
    b = matrix(64, 64, torch.bfloat16, "rows", 9, ctx.device)
    exact = torch.cat(a).double() @ b.double()
    with torch.inference_mode():
        out = torch.empty(exact.shape, dtype=torch.bfloat16, device=ctx.device)
        prepared = ctx.ops.all_gather_matmul_preamble(out, a[rank], b, config=CONFIGS[way])
    for mode, workspace in itertools.product((True, False, True), (None, prepared)):
        with torch.inference_mode(mode):
            out = torch.empty(exact.shape, dtype=torch.bfloat16, device=ctx.device)
            ctx.ops.all_gather_matmul(out, a[rank], b, config=CONFIGS[way], workspace=workspace)
        torch.testing.assert_close(out.double(), exact, rtol=1e-2, atol=1e-2)
    ctx.barrier()
    prepared.close()


@pytest.mark.parametrize("way", [thorough("fused"), "Hopper", "copies"])
def test_evaluation_and_training(ranks, way):
    if way == "Hopper" and torch.version.hip is not None:
        pytest.skip("Hopper's kernel")
    ranks.run(in_two_modes, way)


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
        with mock.patch.object(ctx.ccl, "all_reduce", wraps=ctx.ccl.all_reduce) as all_reduce:
            ctx.ops.matmul_all_reduce(out, (1 + call) * a[ctx.cur_rank], b[ctx.cur_rank], bias, config=config)
        assert all_reduce.call_args.kwargs["config"].all_reduce_variant == variant
        exact = (1 + call) * torch.bmm(a.double(), b.double()).sum(0) + bias
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-3)
    assert ctx.ops.matmul_all_reduce_preamble(out, a[0], b[0], config=config) is None


@pytest.mark.parametrize("variant", [name for name in ALL_REDUCE_VARIANTS if name != "two_shot"])
def test_sums_by_another_all_reduce(ranks, variant):
    ranks.run(sum_by, variant)
