"""all_reduce_rms_norm as operators: gradients, what torch.compile traces, and how they are registered."""

import pytest
import torch
from covering import EVERYTHING

from iris.ccl import functional as collectives
from iris.errors import InvalidCollectiveError
from iris.ops import functional
from ops.norms import BF16, E4M3, EPS, FP32, data, expected, inputs, tolerance


def gradients(ctx, adds):
    """Of the sum of all ranks' results, against autograd in float64 with every rank's input at hand."""
    shape = (3, 40)
    everyone = [each.double().requires_grad_() for each in inputs(ctx, 0, shape, FP32)]
    residual, weight = (
        data(seed, size, FP32).double().requires_grad_() for seed, size in ((77, shape), (99, shape[1:]))
    )
    x, out = expected(sum(everyone), residual if adds else None, weight)
    of_out, of_x = data(5, shape, FP32), data(6, shape, FP32)
    (ctx.num_ranks * (out * of_out + (x * of_x if adds else 0)).sum()).backward()

    given, added, gain = (
        each.detach().float().to(ctx.device).requires_grad_() for each in (everyone[ctx.cur_rank], residual, weight)
    )
    y, total = functional.all_reduce_rms_norm(given, gain, added if adds else None, EPS, collectives.name_of(ctx))
    ((y * of_out.to(ctx.device)).sum() + ((total * of_x.to(ctx.device)).sum() if adds else 0)).backward()
    torch.testing.assert_close(given.grad.cpu(), everyone[ctx.cur_rank].grad.float())
    # Each rank has a residual and a weight of its own.
    for mine, theirs in ((added, residual), (gain, weight))[not adds :]:
        torch.testing.assert_close(mine.grad.cpu(), (theirs.grad / ctx.num_ranks).float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("adds", [True, False])
def test_gradients(ranks, adds):
    ranks.run(gradients, adds)


def forms(ctx, compiler):
    """One row, a residual that lies otherwise in memory or none, and traced by torch.compile."""
    ranks = collectives.name_of(ctx)
    weight = torch.rand(12, device=ctx.device)

    def norm(given, residual, dtype=None):
        return functional.all_reduce_rms_norm(given, weight, residual, EPS, ranks, dtype=dtype)

    call = torch.compile(norm, backend=compiler, fullgraph=True) if compiler else norm
    for shape in ((12,), (5, 12)):
        given = data(ctx.cur_rank, shape, BF16).to(ctx.device).requires_grad_()
        residual = (
            torch.rand(shape[::-1], device=ctx.device).t() if len(shape) > 1 else torch.rand(12, device=ctx.device)
        )
        total = sum(data(rank, shape, BF16).float() for rank in range(ctx.num_ranks)).to(BF16).float().to(ctx.device)
        wanted, bare = (torch.nn.functional.rms_norm(x, (12,), weight, EPS) for x in (total + residual, total))
        out, x = call(given, residual)
        torch.testing.assert_close(out, wanted.to(BF16))
        torch.testing.assert_close(x, total + residual)
        out.float().sum().backward()
        assert given.grad.shape == shape
        out, x = call(given, None, FP32)
        torch.testing.assert_close(out, bare)
        assert x.shape == (0,)


COMPILERS = [None, "aot_eager", *(["inductor"] if EVERYTHING else [])]


@pytest.mark.parametrize("compiler", COMPILERS)
def test_forms(ranks, compiler):
    ranks.run(forms, compiler)


def fp8_forms(ctx, compiler):
    """By a scale that is given, or by one a row, which multiplies what is left; traced as one graph."""
    ranks, shape = collectives.name_of(ctx), (2, 3, 48)
    given, residual, weight = (data(seed, size, BF16) for seed, size in ((0, shape), (7, shape), (9, shape[2:])))
    total = given.float() * ctx.num_ranks
    scale = torch.tensor([0.25], device=ctx.device)

    def by_scale(given, residual, weight):
        out, x = functional.all_reduce_rms_norm(given * 1, weight, residual, EPS, ranks, scale, E4M3)
        return out, x, scale.expand(2, 3, 1) * 1

    def by_row(given, residual, weight):
        return functional.all_reduce_rms_norm_by_row(given * 1, weight, residual, EPS, ranks, E4M3)

    mine = [each.to(ctx.device) for each in (given, residual, weight)]
    for function in (by_scale, by_row):
        call = torch.compile(function, backend=compiler, fullgraph=True) if compiler else function
        for added in (mine[1], None):
            wanted_x, wanted = expected(total.to(BF16), None if added is None else residual, weight)
            out, x, scales = call(mine[0], added, mine[2])
            assert (out.dtype, scales.dtype, scales.shape) == (E4M3, FP32, (2, 3, 1))
            if added is None:
                assert x.shape == (0,)
            else:
                torch.testing.assert_close(x.cpu().double(), wanted_x, rtol=torch.finfo(BF16).eps, atol=1e-6)
            if function is by_row:
                largest = wanted.abs().amax(-1, keepdim=True) / torch.finfo(E4M3).max
                torch.testing.assert_close(scales.cpu().double(), largest, rtol=1e-5, atol=0)
            rtol, atol = tolerance(E4M3, scales.max().item())
            torch.testing.assert_close(out.cpu().double() * scales.cpu().double(), wanted, rtol=rtol, atol=atol)
        with pytest.raises(InvalidCollectiveError, match="rows of torch.float8_e4m3fn have no gradient"):
            function(mine[0], mine[1], mine[2].clone().requires_grad_())


@pytest.mark.parametrize("compiler", COMPILERS)
def test_forms_of_fp8(ranks, compiler):
    ranks.run(fp8_forms, compiler)


def registered(ctx):
    ranks, x = collectives.name_of(ctx), data(ctx.cur_rank, (4, 16), BF16).to(ctx.device)
    weight, scale = torch.ones(16, dtype=BF16, device=ctx.device), torch.ones(1, device=ctx.device)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for residual in (x.clone(), None):
        given = (x, weight, residual, EPS, ranks)
        for operator, rest in (
            (functional.all_reduce_rms_norm, ()),
            (functional.all_reduce_rms_norm, (scale, E4M3)),
            (functional.all_reduce_rms_norm_by_row, (E4M3,)),
        ):
            torch.library.opcheck(operator, (*given, *rest), test_utils=checks)


def test_registrations(ranks):
    ranks.run(registered)
