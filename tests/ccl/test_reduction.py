"""What `op` may be: torch's operations as people type them, and PREMUL_SUM, a factor for each rank's input."""

import itertools

import pytest
import torch
import torch.distributed as dist
from patterns import assert_same_bits
from torch.distributed import _make_nccl_premul_sum as premul_sum
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import iris.distributed  # noqa: F401 (registers the backend)
from ccl.calls import EVERYTHING
from iris.ccl import Config, ReduceOp, functional
from iris.errors import UnsupportedReductionError

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

# How the sums are carried out; the last three add in an order of their own.
WAYS = ["one_shot", "two_shot_push", "two_shot_direct", "two_shot", "pull", "ring", "atomic", "spinlock"]
IN_ORDER = WAYS[:5]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e5m2, torch.complex64]


def factor_of(rank):
    return 0.3 + 0.71 * rank


def inputs(ctx, n, dtype, seed=0):
    """Those of all ranks."""
    generator = torch.Generator().manual_seed(n + seed)
    parts = torch.randn(ctx.num_ranks, n, 1 + dtype.is_complex, generator=generator, dtype=torch.float64)
    values = torch.view_as_complex(parts).to(dtype) if dtype.is_complex else parts[..., 0].to(dtype)
    return values.to(ctx.device)


def expected(xs):
    """Each product and each sum rounded to float32 (float64 for float64), the result once more to its own type."""
    dtype = xs.dtype
    xs = torch.view_as_real(xs) if dtype.is_complex else xs
    wide = torch.float64 if xs.dtype == torch.float64 else torch.float32
    total = None
    for rank, x in enumerate(xs):
        product = x.to(wide) * torch.tensor(factor_of(rank), dtype=wide, device=x.device)
        total = product if total is None else total + product
    return torch.view_as_complex(total) if dtype.is_complex else total.to(dtype)


def one_way(ctx, name, dtype, use_gluon):
    me, config = ctx.cur_rank, Config(use_gluon=use_gluon, all_reduce_variant=name)
    for n in (5, 1201):
        xs = inputs(ctx, n, dtype)
        given, result = ctx.empty(n, dtype=dtype), ctx.empty(n, dtype=dtype)
        given.copy_(xs[me])
        # As a number, and as a tensor.
        for factor in (factor_of(me), torch.tensor(factor_of(me), dtype=torch.float64, device=ctx.device)):
            ctx.ccl.all_reduce(result, given, op=premul_sum(factor), config=config)
            if name in IN_ORDER:
                assert_same_bits(result, expected(xs))
            else:
                near, want = 0.3 if dtype.itemsize == 1 else 0.01, expected(xs).to(torch.complex64)
                torch.testing.assert_close(result.to(torch.complex64), want, rtol=near, atol=near)
        ctx.ccl.all_reduce(result, given, op=dist.ReduceOp.SUM, config=config)
        assert not torch.equal(result.cpu(), expected(xs).cpu())


def ways():
    """Every way with every dtype; in the short run each way with one."""
    if EVERYTHING:
        return list(itertools.product(WAYS, DTYPES, [False, True]))
    return [(name, DTYPES[i % len(DTYPES)], i % 2 == 1) for i, name in enumerate(WAYS)]


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name, dtype, use_gluon", ways(), ids=str)
def test_inputs_are_multiplied_and_rounded_once(ranks, name, dtype, use_gluon):
    ranks.run(one_way, name, dtype, use_gluon)


def through_torch(ctx):
    """Every call that reduces; with ``async_op``; several as one."""
    group, me, size, n = dist.new_group(backend=f"{ctx.device.type}:iris"), ctx.cur_rank, ctx.num_ranks, 6
    xs = inputs(ctx, n * size, torch.bfloat16)
    total, op, calls = expected(xs), premul_sum(factor_of(me)), 0

    def same(result, want):
        nonlocal calls
        assert_same_bits(result, want)
        calls += 1

    for async_op in (False, True):
        x = xs[me].clone()
        work = dist.all_reduce(x, op, group=group, async_op=async_op)
        if async_op:
            work.wait()
        same(x, total)
        x = xs[me].clone()
        work = dist.reduce(x, group=group, group_dst=size - 1, op=op, async_op=async_op)
        if async_op:
            work.wait()
        if me == size - 1:
            same(x, total)
        part = torch.empty(n, dtype=x.dtype, device=ctx.device)
        work = dist.reduce_scatter_tensor(part, xs[me], op, group=group, async_op=async_op)
        if async_op:
            work.wait()
        same(part, total.view(size, n)[me])
        work = dist.reduce_scatter(part, list(xs[me].view(size, n)), op, group=group, async_op=async_op)
        if async_op:
            work.wait()
        same(part, total.view(size, n)[me])
        several = [inputs(ctx, n * size, torch.bfloat16, seed) for seed in range(3)]
        parts = [torch.empty_like(part) for _ in several]
        with dist.distributed_c10d._coalescing_manager(group, ctx.device, async_ops=async_op) as works:
            for result, each in zip(parts, several, strict=True):
                dist.reduce_scatter_tensor(result, each[me], op, group=group)
        if async_op:
            works.wait()
        for result, each in zip(parts, several, strict=True):
            same(result, expected(each).view(size, n)[me])
    dist.destroy_process_group(group)
    return calls


@pytest.mark.ranks(2)
def test_premul_sum_through_torch(ranks):
    assert min(ranks.run(through_torch)) >= 12


def divided(ctx, factor, dtype):
    """FSDP2 multiplies by the inverse of the factor in the reduce-scatter itself."""
    group, size = dist.new_group(backend=f"{ctx.device.type}:iris"), ctx.num_ranks
    mesh = dist.DeviceMesh.from_group(group, ctx.device.type)
    torch.manual_seed(3)
    model, exact = (torch.nn.Linear(12, 10).to(ctx.device) for _ in range(2))
    exact.load_state_dict(model.state_dict())
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype))
    model.set_gradient_divide_factor(factor)
    data = torch.randn(size, 4, 12).to(ctx.device)
    model(data[ctx.cur_rank]).sum().backward()
    exact(data.view(-1, 12)).sum().backward()
    for mine, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor().float(), theirs.grad / factor, rtol=0.02, atol=0.02)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_divided_by_a_factor(ranks, dtype):
    ranks.run(divided, 3.0, dtype)


def as_people_type_them(ctx):
    xs = torch.arange(1.0, ctx.num_ranks + 1, device=ctx.device)
    x, ranks = xs[ctx.cur_rank].reshape(1), functional.name_of(ctx)
    for op, want in ((ReduceOp.SUM, xs.sum()), (ReduceOp.AVG, xs.mean()), (ReduceOp.MIN, xs.min()),
                     (ReduceOp.MAX, xs.max()), (ReduceOp.PRODUCT, xs.prod())):  # fmt: skip
        constant = getattr(dist.ReduceOp, op.name)
        for spelt in (op, constant, dist.ReduceOp(constant)):
            for call in ("all_reduce", "reduce_scatter", "reduce"):
                given = x.expand(ctx.num_ranks).contiguous() if call == "reduce_scatter" else x
                result = torch.empty(1, device=ctx.device)
                getattr(ctx.ccl, call)(result, given, op=spelt)
                assert call == "reduce" and ctx.cur_rank or result.item() == want, (call, spelt)
            assert functional.all_reduce(x, ranks, spelt).item() == want
            assert functional.reduce(x, ranks, 0, spelt).item() == (0 if ctx.cur_rank else want)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, op: functional.all_reduce(x, ranks, op), backend="aot_eager", fullgraph=True)
    for op in (dist.ReduceOp.SUM, ReduceOp.SUM, "sum"):
        assert compiled(x, op).item() == xs.sum()


@pytest.mark.ranks(2)
def test_operations_of_torch(ranks):
    ranks.run(as_people_type_them)


def refused(ctx):
    x, name = torch.ones(4, device=ctx.device), functional.name_of(ctx)
    for op, words in [
        (dist.ReduceOp.BAND, "no ReduceOp.BAND.*Gather with all_gather"),
        (dist.ReduceOp.PREMUL_SUM, "needs a factor: torch.distributed._make_nccl_premul_sum"),
        ("sum", "op='sum' is not one of iris.ccl.ReduceOp .SUM, .*nor of torch.distributed.ReduceOp"),
        (premul_sum(torch.ones(1, dtype=torch.complex64)), "a real number, and not of torch.complex64"),
    ]:
        with pytest.raises(UnsupportedReductionError, match=words):
            ctx.ccl.all_reduce(x, x, op=op)
    with pytest.raises(UnsupportedReductionError, match="PREMUL_SUM of torch.int32 would not be of that type"):
        ctx.ccl.all_reduce(x.int(), x.int(), op=premul_sum(0.5))
    with pytest.raises(UnsupportedReductionError, match="Multiply the input by the factor and use 'sum'"):
        functional.all_reduce(x, name, premul_sum(0.5))


def test_what_is_no_operation(ranks):
    ranks.run(refused)


def not_combined(ctx, dtype):
    group, x = dist.new_group(), torch.empty(8, dtype=dtype, device=ctx.device)
    for _ in range(2):
        with pytest.raises(UnsupportedReductionError, match="cannot be combined: convert it, or move it as it is"):
            ctx.ccl.all_reduce(x, x, group=group)
    one = torch.ones(4, device=ctx.device)
    ctx.ccl.all_reduce(one, one, group=group)
    ctx.barrier()
    assert one.tolist() == [ctx.num_ranks] * 4


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.bits8, torch.bits16, torch.float8_e8m0fnu])
def test_what_has_no_arithmetic_is_refused_and_the_group_goes_on(ranks, dtype):
    ranks.run(not_combined, dtype)
