"""Fused operations over hosts: whole numbers, whose sums are exact however often they are rounded."""

import pytest
import torch
from covering import sample
from rank_pool import HOSTS, Hosts

from iris.ccl import functional as collectives
from iris.errors import InvalidCollectiveError, SeveralHostsError
from iris.ops import FusedConfig, functional
from ops.products import CONFIGS, LAYOUTS, OPERATIONS, place, result_of

LOOPS = ("all_gather_matmul", "matmul_reduce_scatter")
# M (a share of a rank, where rows are shared), N, K.
SHAPES = [(8, 16, 32), (1, 1, 1), (5, 7, 9), (20, 24, 40)]


def whole_numbers(rows, columns, dtype, layout, seed, device):
    """From -2 to 2, laid out as `place` does."""
    values = torch.randint(-2, 3, (rows, columns), generator=torch.Generator().manual_seed(seed))
    view, _ = place(rows, columns, dtype, layout, device)
    view.copy_(values)
    return view


def multiply(ctx, name, cases):
    size, rank = ctx.num_ranks, ctx.cur_rank
    for number, (shape, dtype, config, layout_a, layout_b, layout_out, biased, scaled, heap) in enumerate(cases):
        M, N, K = shape
        M *= size if name == "matmul_reduce_scatter" else 1
        for call in range(2):
            a, b = (
                [
                    whole_numbers(*each, dtype, layout, 1000 * number + 100 * call + 2 * r + seed, ctx.device)
                    for r in range(size)
                ]
                for each, layout, seed in (((M, K), layout_a, 0), ((K, N), layout_b, 1))
            )
            bias = torch.arange(N, device=ctx.device).remainder(5).to(dtype) if biased else None
            exact = result_of(name, a, b, rank)
            scales = {}
            if scaled and config == "fused" and name in LOOPS:
                # Powers of two, the same on all ranks: of a sum the rows are shared.
                rows = len(exact) * (size if name == "matmul_reduce_scatter" else 1)
                factors = 2.0 ** torch.arange(rows, device=ctx.device).remainder(3)
                scales = {"scale_a": factors, "scale_b": torch.full((1,), 0.5, device=ctx.device)}
                mine = factors.chunk(size)[rank] if name == "matmul_reduce_scatter" else factors
                exact = exact * mine[:, None] * 0.5
            exact = exact if bias is None else exact + bias
            out, around = place(*exact.shape, dtype, layout_out, ctx.device, ctx if heap else None)
            chosen = CONFIGS[config] if name in LOOPS else None
            getattr(ctx.ops, name)(out, a[rank], b[rank], bias, config=chosen, **scales)
            text = f"call {number}, {name} of {shape} {dtype}, {config}, {layout_a}, {layout_b}, {layout_out}"
            assert torch.equal(out.double(), exact.double()), text
            assert around.count_nonzero() == out.count_nonzero(), text
    ctx.barrier()


@pytest.mark.ranks(*HOSTS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_products_over_hosts(ranks, name):
    dtypes, configs = [torch.float32, torch.bfloat16], ["chosen", "fused", "copies"]
    cases = sample(SHAPES, dtypes, configs, LAYOUTS, LAYOUTS, LAYOUTS, [False, True], [False, True], [False, True])
    ranks.run(multiply, name, cases)


def gather_columns(ctx):
    """One product of what all ranks have, so that the sum is rounded once."""
    size, rank = ctx.num_ranks, ctx.cur_rank
    a = [torch.randn(5, 3, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    b = torch.randn(3 * size, 4, generator=torch.Generator().manual_seed(99))
    out = torch.empty(5, 4, device=ctx.device)
    ctx.ops.all_gather_matmul(out, a[rank].to(ctx.device), b.to(ctx.device), gather_dim="k")
    torch.testing.assert_close(out.cpu(), torch.cat(a, 1) @ b)


@pytest.mark.ranks(Hosts(2, 2, dealt=True))
def test_columns_are_gathered_over_hosts(ranks):
    ranks.run(gather_columns)


def differentiate(ctx):
    """The gradients are operations over hosts, too."""
    name, size = collectives.name_of(ctx), ctx.num_ranks
    x = torch.full((2, 4), ctx.cur_rank + 1.0, device=ctx.device).requires_grad_()
    w = torch.ones(4, 3, device=ctx.device)
    y = functional.all_gather_matmul(x, w, None, name)
    assert y.shape == (2 * size, 3) and torch.equal(y[::2, 0], 4.0 * torch.arange(1, size + 1, device=ctx.device))
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3.0 * size))


@pytest.mark.ranks(Hosts(2, 2))
def test_operators_have_gradients_over_hosts(ranks):
    ranks.run(differentiate)


def normalise(ctx):
    """The sum is that of all_reduce, bit by bit; behind it is the kernel of one host."""
    for rows, columns, dtype in ((5, 32, torch.bfloat16), (64, 96, torch.float32)):
        x = whole_numbers(rows, columns, dtype, "rows", ctx.cur_rank, ctx.device)
        weight = torch.linspace(0.5, 2, columns, device=ctx.device).to(dtype)
        residual, total, out = torch.ones_like(x), torch.empty_like(x), torch.empty_like(x)
        ctx.ccl.all_reduce(total, x)
        expected = total.float() + 1
        ctx.ops.all_reduce_rms_norm(out, x, weight, residual=residual)
        assert torch.equal(residual, expected.to(dtype))
        normalised = torch.nn.functional.rms_norm(expected, (columns,), weight.float(), 1e-6)
        torch.testing.assert_close(out.float(), normalised, rtol=1e-2, atol=1e-5)


@pytest.mark.ranks(Hosts(2, 2), Hosts(3, 2))
def test_a_norm_behind_a_sum_over_hosts(ranks):
    ranks.run(normalise)


def ask_for_the_wrong(ctx):
    size = ctx.num_ranks
    a, b, out = (torch.ones(shape, device=ctx.device) for shape in ((size, 4), (4, 3), (size, 3)))
    with pytest.raises(InvalidCollectiveError, match=rf"of {size} ranks .*out has to be"):
        ctx.ops.all_gather_matmul(out, a, b)
    with pytest.raises(SeveralHostsError, match="config"):
        ctx.ops.matmul_all_reduce(out, a, b, config=FusedConfig())
    with pytest.raises(SeveralHostsError, match="need one dtype"):
        ctx.ops.matmul_all_reduce(out, a.bfloat16(), b.bfloat16())
    work = ctx.ops.matmul_all_reduce(out, a, b, async_op=True)
    work.wait()
    assert out.unique().tolist() == [4 * size]


@pytest.mark.ranks(Hosts(2, 2))
def test_what_operations_over_hosts_refuse(ranks):
    ranks.run(ask_for_the_wrong)
