"""torch's own fused operators, `torch.ops.symm_mem.fused_*`, on Iris: against float64, laid out as torch does it."""

import functools
import math
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from covering import EVERYTHING, sample

import iris
from iris.inductor import symm_mem

# Shapes of this rank's A; K is a multiple of 16, as torch's products of fp8 ask for. Scattered extents are multiples of
# four, the most ranks.
SHAPES = [(8, 32), (4, 8, 32), (4, 4, 4, 32)]
COLUMNS = (16, 48)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
RANKS = (1, 2, 4) if EVERYTHING else (2, 4)
ops = torch.ops.symm_mem


# Once in a process.
put_in_place = functools.cache(symm_mem.put_in_place)


def setup(ctx):
    put_in_place()
    return dist.group.WORLD


def random(ctx, shape, dtype, seed):
    """Each rank's."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype).to(ctx.device) for _ in range(ctx.num_ranks)]


def near(result, exact, sizes, roundings, bits=20):
    """Within so many roundings of the result's dtype, each of half a unit in the last place of what is rounded.

    ``sizes``: the sums of absolute values. What float32 loses while it adds up is less than 2^-20 of these here, since
    there are at most 128 terms of 2^-24 each, which rarely all go one way.
    """
    allowed = roundings * torch.finfo(result.dtype).eps / 2 * sizes + 2.0**-bits * sizes + 1e-7
    wrong = (result.double() - exact).abs() > allowed
    assert not wrong.any(), (result.double() - exact).abs().max()


def same_layout(result, operator, *arguments, **options):
    """That torch's compiler, which asks the Meta kernel, expects these strides."""
    on_meta = [each.to("meta") if isinstance(each, torch.Tensor) else each for each in arguments]
    on_meta = [
        [x.to("meta") if isinstance(x, torch.Tensor) else x for x in each] if isinstance(each, list) else each
        for each in on_meta
    ]
    expected = operator(*on_meta, **options)
    flat = torch.utils._pytree.tree_leaves
    for got, wanted in zip(flat(result), flat(expected), strict=True):
        if got is None:
            assert wanted is None
            continue
        # Of one element the step to the next means nothing.
        of_got, of_wanted = (
            [stride for n, stride in zip(x.shape, x.stride(), strict=True) if n > 1] for x in (got, wanted)
        )
        assert (got.shape, of_got, got.dtype) == (wanted.shape, of_wanted, wanted.dtype)


def only_iris():
    """While this lasts, what torch would carry fails."""
    return mock.patch.object(symm_mem, "by_torch", side_effect=AssertionError("torch was asked"))


def gathers(ctx, shape, dim, dtype, number, return_a):
    group, me, W = setup(ctx), ctx.cur_rank, ctx.num_ranks
    a = random(ctx, shape, dtype, 1)
    depth = shape[-1] * (W if dim == len(shape) - 1 else 1)
    bs = [random(ctx, (depth, n), dtype, 10 + n)[me] for n in COLUMNS[:number]]
    with only_iris():
        kept, results = ops.fused_all_gather_matmul(a[me], bs, dim, group.group_name, return_A=return_a)
    whole = torch.cat(a, dim)
    assert torch.equal(kept, whole) if return_a else kept is None
    for result, b in zip(results, bs, strict=True):
        near(result, whole.double() @ b.double(), whole.double().abs() @ b.double().abs(), 1.01)
    same_layout((kept, results), ops.fused_all_gather_matmul, a[me], bs, dim, group.group_name, return_A=return_a)
    ctx.barrier()


def dims(shapes):
    return [(shape, dim) for shape in shapes for dim in range(len(shape))]


@pytest.mark.ranks(*RANKS)
def test_products_of_what_is_gathered(ranks):
    for (shape, dim), dtype, number, return_a in sample(dims(SHAPES), DTYPES, [1, 2], [False, True]):
        ranks.run(gathers, shape, dim, dtype, number, return_a)


def uneven_columns(ctx):
    """As `torch.chunk` splits five among four ranks: the last one has none."""
    group, me = setup(ctx), ctx.cur_rank
    each = [2, 2, 1, 0][-ctx.num_ranks :]
    a = random(ctx, (8, 32), torch.float32, 1)
    b = torch.randn(32, each[me], generator=torch.Generator().manual_seed(2 + me)).to(ctx.device)
    with only_iris():
        for keep in (True, False):
            gathered, (out,) = ops.fused_all_gather_matmul(a[me], [b], 0, group.group_name, return_A=keep)
            near(out, torch.cat(a).double() @ b.double(), torch.cat(a).double().abs() @ b.double().abs(), 1)
            assert gathered is None or torch.equal(gathered, torch.cat(a))


@pytest.mark.ranks(2, 4)
def test_columns_may_be_split_unevenly(ranks):
    ranks.run(uneven_columns)


def scatters(ctx, shape, dim, dtype, op):
    group, me, W = setup(ctx), ctx.cur_rank, ctx.num_ranks
    a, b = random(ctx, shape, dtype, 1), random(ctx, (shape[-1], COLUMNS[1]), dtype, 2)
    # Each rank's product, of this size, would be too large a sum of float16; the mean is not.
    factor = 2.0**11 if (dtype, op) == (torch.float16, "avg") else 1
    a = [each * factor for each in a]
    with only_iris():
        result = ops.fused_matmul_reduce_scatter(a[me], b[me], op, dim, group.group_name)
    share = W if op == "avg" else 1
    exact = sum(x.double() @ y.double() for x, y in zip(a, b, strict=True)) / share
    sizes = sum(x.double().abs() @ y.double().abs() for x, y in zip(a, b, strict=True)) / share
    exact, sizes = (each.chunk(W, dim)[me] for each in (exact, sizes))
    # Each product is rounded, and their sum, and for a mean once more.
    near(result, exact, sizes, 3)
    same_layout(result, ops.fused_matmul_reduce_scatter, a[me], b[me], op, dim, group.group_name)
    ctx.barrier()


@pytest.mark.ranks(*RANKS)
def test_sums_and_means_of_products(ranks):
    for (shape, dim), dtype, op in sample(dims(SHAPES), DTYPES, ["sum", "avg"]):
        ranks.run(scatters, shape, dim, dtype, op)


def scales(kind, shape, seed, device):
    if kind == "all":
        shape = (1,)
    return (0.5 + torch.rand(shape, generator=torch.Generator().manual_seed(seed))).to(device)


def gathers_fp8(ctx, shape, dim, dtype, kind, biased, out_dtype):
    group, me, W = setup(ctx), ctx.cur_rank, ctx.num_ranks
    a, whole_shape = random(ctx, shape, dtype, 1), list(shape)
    whole_shape[dim] *= W
    # By columns, as torch takes B of fp8.
    bs = [random(ctx, (n, shape[-1]), dtype, 10 + n)[me].t() for n in COLUMNS]
    of_b = [scales("all" if kind == "all" else "rows", (1, b.shape[1]), 3 + me, ctx.device) for b in bs]
    if kind == "all rows":
        of_a = scales(kind, (*whole_shape[:-1], 1), 4, ctx.device)
        given = of_a
    else:
        every = [scales(kind, (*shape[:-1], 1), 40 + (rank if kind == "rows" else 0), ctx.device) for rank in range(W)]
        of_a, given = (every[0] if kind == "all" else torch.cat(every, dim)), every[me]
    biases = [random(ctx, (b.shape[1],), out_dtype, 5)[me] if biased else None for b in bs]
    arguments = (a[me], bs, given, of_b, dim, group.group_name, biases, [None] * 2, [out_dtype] * 2, [False] * 2)
    with only_iris():
        kept, results = ops.fused_all_gather_scaled_matmul(*arguments)
    whole = torch.cat([each.float() for each in a], dim)
    assert torch.equal(kept.float(), whole)
    for result, b, scale, bias in zip(results, bs, of_b, biases, strict=True):
        factor = of_a.double() * scale.double()
        exact, sizes = whole.double() @ b.double() * factor, whole.double().abs() @ b.double().abs() * factor
        if bias is not None:
            exact, sizes = exact + bias.double(), sizes + bias.double().abs()
        near(result, exact, sizes, 2, bits=14)
    same_layout((kept, results), ops.fused_all_gather_scaled_matmul, *arguments)
    ctx.barrier()


KINDS = ["all", "rows", "all rows"]


@pytest.mark.ranks(*RANKS)
def test_products_of_fp8(ranks):
    places = [(shape, dim) for shape, dim in dims(SHAPES) if dim < len(shape) - 1]
    for (shape, dim), kind, biased in sample(places, KINDS, [False, True]):
        ranks.run(gathers_fp8, shape, dim, FP8[0], kind, biased, torch.bfloat16)


def scatters_fp8(ctx, shape, dim, kind, op, out_dtype):
    """A as Inductor gives it: rows, of which ``shape`` says what they were."""
    group, me, W = setup(ctx), ctx.cur_rank, ctx.num_ranks
    a = random(ctx, (math.prod(shape[:-1]), shape[-1]), FP8[0], 1)
    b = [each.t() for each in random(ctx, (COLUMNS[1], shape[-1]), FP8[0], 2)]
    of_a = [scales(kind, (len(a[0]), 1), 30 + rank, ctx.device) for rank in range(W)]
    of_b = [scales(kind, (1, COLUMNS[1]), 60 + rank, ctx.device) for rank in range(W)]
    arguments = (
        a[me], b[me], of_a[me], of_b[me], op, dim, min(dim, 1), group.group_name, [*shape[:-1], COLUMNS[1]], None, None,
        out_dtype, False,
    )  # fmt: skip
    with only_iris():
        result = ops.fused_scaled_matmul_reduce_scatter(*arguments)
    every = list(zip(a, b, of_a, of_b, strict=True))
    share = W if op == "avg" else 1
    exact, sizes = (
        sum(form(x.double()) @ form(y.double()) * s.double() * t.double() for x, y, s, t in every) / share
        for form in (torch.Tensor.clone, torch.abs)
    )
    exact, sizes = (each.view(*shape[:-1], -1).chunk(W, dim)[me] for each in (exact, sizes))
    near(result, exact, sizes, 3, bits=14)
    same_layout(result, ops.fused_scaled_matmul_reduce_scatter, *arguments)
    ctx.barrier()


@pytest.mark.ranks(*RANKS)
def test_sums_of_products_of_fp8(ranks):
    for (shape, dim), kind, op, dtype in sample(dims(SHAPES), ["all", "rows"], ["sum", "avg"], DTYPES[1:]):
        ranks.run(scatters_fp8, shape, dim, kind, op, dtype)


def left_to_torch(ctx, backend):
    """What Iris does not take is as it was before: results and errors are torch's."""
    group, me, W = setup(ctx), ctx.cur_rank, ctx.num_ranks
    group = dist.new_group(backend=backend) if backend else group
    name = group.group_name
    a, b = random(ctx, (8, 32), torch.float64, 1), random(ctx, (32, 16), torch.float64, 2)
    kept, (result,) = ops.fused_all_gather_matmul(a[me], [b[me]], 0, name)
    assert torch.equal(kept, torch.cat(a))
    torch.testing.assert_close(result, torch.cat(a) @ b[me])
    result = ops.fused_matmul_reduce_scatter(a[me], b[me], "sum", 0, name)
    torch.testing.assert_close(result, sum(x @ y for x, y in zip(a, b, strict=True)).chunk(W)[me])
    # Each rank's bias is added, as torch does.
    a, b = ([each.to(FP8[0]) for each in of_all] for of_all in (a, b))
    b = [each.t().contiguous().t() for each in b]
    one, bias = torch.ones(1, device=ctx.device), random(ctx, (16,), torch.bfloat16, 3)
    result = ops.fused_scaled_matmul_reduce_scatter(
        a[me], b[me], one, one, "sum", 0, 0, name, [8, 16], bias[me], None, torch.bfloat16, False
    )
    exact = sum(x.double() @ y.double() + z.double() for x, y, z in zip(a, b, bias, strict=True)).chunk(W)[me]
    torch.testing.assert_close(result.double(), exact, rtol=3e-2, atol=2e-1)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        ops.fused_all_gather_matmul(a[me].float(), [b[me][1:].float()], 0, name)
    ctx.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", [None, "cuda:iris"])
def test_what_stays_with_torch(ranks, backend):
    if backend is None and torch.cuda.is_available():
        pytest.skip("torch's symmetric memory takes a GPU for each rank")
    ranks.run(left_to_torch, backend)


def in_the_group(ctx):
    """A group of Iris' backend has a context, which is used. `iris.accelerate` puts the operators in place."""
    group = dist.new_group(backend="cuda:iris")
    a = random(ctx, (8, 32), torch.bfloat16, 1)
    put_in_place.cache_clear()
    # Passes over graphs would stay in this process, and be in the way of others' tests.
    module = sys.modules[iris.accelerate.__module__]
    with mock.patch.object(module, "add_graph_pass"), mock.patch.object(module, "_registered", []), only_iris():
        iris.accelerate()
        kept, _ = ops.fused_all_gather_matmul(a[ctx.cur_rank], [a[0].t()], 0, group.group_name)
    assert torch.equal(kept, torch.cat(a))


def test_groups_of_the_backend(ranks):
    ranks.run(in_the_group)
