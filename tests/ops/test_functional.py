"""Fused operations as operators: torch.compile keeps them in one graph, with the gradients of plain torch."""

import subprocess

import pytest
import torch
import torch.distributed as dist
from covering import EVERYTHING
from preloaded import LIMIT_S, python
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from iris.ccl.functional import name_of
from iris.errors import InvalidCollectiveError, InvalidGroupError
from iris.ops import functional
from ops.products import OPERATIONS

M, N, K = 6, 5, 7  # rows of a rank's share
COMPILERS = ["aot_eager", *(["inductor"] if EVERYTHING else [])]


def reference(name, a, b, bias):
    """What each rank gets, of all ranks' ``a``, ``b`` and ``bias``."""
    if name == "all_gather_matmul":
        return [torch.cat(a) @ y + z for y, z in zip(b, bias, strict=True)]
    products = [x @ y for x, y in zip(a, b, strict=True)]
    if name == "matmul_all_gather":
        return [torch.cat([product + z for product, z in zip(products, bias, strict=True)])] * len(a)
    parts = sum(products).chunk(len(a)) if name == "matmul_reduce_scatter" else [sum(products)] * len(a)
    return [part + z for part, z in zip(parts, bias, strict=True)]


def compare(ctx, name, compiler):
    # What the same code was compiled to for other operations would count against torch's limit.
    torch.compiler.reset()
    W, me, ranks = ctx.num_ranks, ctx.cur_rank, name_of(ctx)
    generator = torch.Generator().manual_seed(11)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(ctx.device)

    rows = W * M if name == "matmul_reduce_scatter" else M
    a, b, bias = ([random(*shape).requires_grad_() for _ in range(W)] for shape in ((rows, K), (K, N), (N,)))
    mine = [each[me].detach().clone().requires_grad_() for each in (a, b, bias)]

    def function(x, y, z):
        return 2 * getattr(functional, name)(torch.sin(x), y, z, ranks)

    result = (torch.compile(function, backend=compiler, fullgraph=True) if compiler else function)(*mine)
    expected = [2 * each for each in reference(name, [torch.sin(x) for x in a], b, bias)]
    torch.testing.assert_close(result, expected[me])
    # Every rank weighs the elements in its own way; the gradient is that of the sum of all ranks' losses.
    weights = [random(*each.shape) for each in expected]
    (result * weights[me]).sum().backward()
    sum((each * weight).sum() for each, weight in zip(expected, weights, strict=True)).backward()
    torch.testing.assert_close([each.grad for each in mine], [each[me].grad for each in (a, b, bias)])


def test_they_are_there_once_iris_is_imported():
    names = "iris.ops.functional, iris.ccl.functional, torch.ops.iris.matmul_all_reduce, torch.ops.iris.all_reduce"
    names += ", iris.experts.functional, torch.ops.iris.experts_dispatch"
    subprocess.run([*python(), "-c", f"import iris, torch; {names}"], check=True, timeout=LIMIT_S)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("compiler", [None, *COMPILERS])
@pytest.mark.parametrize("name", OPERATIONS)
def test_results_and_gradients(ranks, name, compiler):
    ranks.run(compare, name, compiler)


def of_any_rows(ctx, name):
    """One program for all numbers of rows."""
    torch.compiler.reset()
    ranks, generator = name_of(ctx), torch.Generator().manual_seed(ctx.cur_rank)
    b = torch.rand(K, N, generator=generator).to(ctx.device)
    compiler = CompileCounterWithBackend("aot_eager")
    function = torch.compile(
        lambda a: getattr(functional, name)(a, b, None, ranks), backend=compiler, fullgraph=True, dynamic=True
    )
    for rows in range(3, 7):
        a = torch.rand(ctx.num_ranks * rows, K, generator=generator).to(ctx.device)
        torch.testing.assert_close(function(a), getattr(functional, name)(a, b, None, ranks))
    assert compiler.frame_count == 1


@pytest.mark.parametrize("name", OPERATIONS)
def test_compiled_for_any_number_of_rows(ranks, name):
    ranks.run(of_any_rows, name)


def with_a_wider_bias(ctx, name):
    """A bias' gradient is not rounded to the matrices' dtype."""
    W, ranks = ctx.num_ranks, name_of(ctx)
    a, b = (torch.ones(shape, dtype=torch.bfloat16, device=ctx.device) for shape in ((8 * W, 16), (16, 8)))
    bias = torch.zeros(8, device=ctx.device, requires_grad=True)
    result = getattr(functional, name)(a, b, bias, ranks, dtype=torch.float32)
    weights = torch.rand(result.shape, generator=torch.Generator().manual_seed(3)).to(ctx.device)
    (result * weights).sum().backward()
    # Of what each rank adds to its own rows, which are in the results of all.
    mine = W * weights.chunk(W)[ctx.cur_rank] if name == "matmul_all_gather" else weights
    torch.testing.assert_close(bias.grad, mine.sum(0))


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_gradient_of_a_wider_bias(ranks, name):
    ranks.run(with_a_wider_bias, name)


def of_fp8(ctx, name, compiler):
    torch.compiler.reset()
    W, me, ranks = ctx.num_ranks, ctx.cur_rank, name_of(ctx)
    generator = torch.Generator().manual_seed(12)
    shape = (2 * W, 16)
    a, b = ([torch.randn(shape, generator=generator).to(torch.float8_e4m3fn) for _ in range(W)] for _ in range(2))
    factor, bias = torch.tensor([0.5], device=ctx.device), torch.randn(2 * W, generator=generator)
    factors = {"scale_a": factor, "scale_b": factor / 2}
    expected = reference(name, [x.float() / 2 for x in a], [y.float().t() / 4 for y in b], [bias] * W)[me]
    x, y, z = a[me].to(ctx.device), b[me].to(ctx.device).t(), bias.to(ctx.device)

    @torch.compile(backend=compiler, fullgraph=True)
    def function(x, y, z, dtype):
        return getattr(functional, name)(x, y, z, ranks, **factors, dtype=dtype) * 1

    for dtype in (None, torch.float32):
        result = function(x, y, z, dtype)
        assert result.dtype == (dtype or torch.bfloat16)
        torch.testing.assert_close(result.cpu().float(), expected, rtol=2e-2, atol=5e-2)
    with pytest.raises(InvalidCollectiveError, match="product of torch.float8_e4m3fn with scales has no gradient"):
        getattr(functional, name)(x, y, z.requires_grad_(), ranks, scale_a=factor)
    for scale in factors:
        with pytest.raises(InvalidCollectiveError, match="product of torch.float32 with scales has no gradient"):
            getattr(functional, name)(x.float(), y.float(), z, ranks, **{scale: factor})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_fp8(ranks, name, compiler):
    ranks.run(of_fp8, name, compiler)


def with_wider_result(ctx, name):
    """Of bf16 with a result of float32, the gradients come in the dtypes of what they are of."""
    ranks, shapes = name_of(ctx), ((3 * ctx.num_ranks, 8), (8, 4))
    given = [torch.ones(shape, dtype=torch.bfloat16, device=ctx.device, requires_grad=True) for shape in shapes]
    result = getattr(functional, name)(*given, None, ranks, dtype=torch.float32)
    assert result.dtype == torch.float32
    result.sum().backward()
    assert [x.grad.dtype for x in given] == 2 * [torch.bfloat16] and all(x.grad.any() for x in given)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_wider_result(ranks, name):
    ranks.run(with_wider_result, name)


def under_autocast(ctx, name, compiler):
    """Weights of float32 meet what another layer has made in the narrow dtype, and get gradients of float32."""
    torch.compiler.reset()
    W, ranks, device = ctx.num_ranks, name_of(ctx), ctx.device.type
    generator = torch.Generator().manual_seed(4)
    x, first, b = (torch.randn(shape, generator=generator).to(ctx.device) for shape in ((4 * W, 8), (8, 16), (16, 5)))
    bias = torch.randn(5, generator=generator).to(ctx.device)
    operation = getattr(functional, name)

    def layers(x, first, b, bias):
        with torch.autocast(device, torch.bfloat16):
            return operation(x @ first, b, bias, ranks)

    given = [each.clone().requires_grad_() for each in (x, first, b, bias)]
    result = (torch.compile(layers, backend=compiler, fullgraph=True) if compiler else layers)(*given)
    assert result.dtype == torch.bfloat16
    result.square().sum().backward()

    exact = [each.clone().requires_grad_() for each in (x, first, b, bias)]
    narrow = [each.bfloat16() for each in exact]
    expected = operation(narrow[0] @ narrow[1], narrow[2], narrow[3], ranks)
    expected.square().sum().backward()
    torch.testing.assert_close(result, expected)
    # A compiler may leave a rounding out.
    grads = [each.grad for each in given], [each.grad for each in exact]
    torch.testing.assert_close(*grads, rtol=1e-2, atol=1e-1)

    with torch.autocast(device, torch.float16):
        assert operation(x, first, None, ranks).dtype == torch.float16
        assert operation(x, first, None, ranks, dtype=torch.float32).dtype == torch.float32
        wider = operation(x, first, x[0].repeat(2), ranks, dtype=torch.float32)
        torch.testing.assert_close(
            wider - operation(x, first, None, ranks, dtype=torch.float32), x[0].repeat(2) + 0 * wider
        )
        factors = torch.full((1,), 0.5, device=ctx.device), torch.full((1,), 0.25, device=ctx.device)
        of_fp8 = operation(*(each.to(torch.float8_e4m3fn) for each in (x, first)), None, ranks, *factors)
        with pytest.raises(InvalidCollectiveError, match="one dtype"):
            operation(x.double(), first, None, ranks)
    given = (each.to(torch.float8_e4m3fn) for each in (x, first))
    assert torch.equal(of_fp8, operation(*given, None, ranks, *factors)) and of_fp8.dtype == torch.bfloat16


@pytest.mark.ranks(2)
@pytest.mark.parametrize("compiler", [None, *COMPILERS])
@pytest.mark.parametrize("name", OPERATIONS)
def test_autocast(ranks, name, compiler):
    ranks.run(under_autocast, name, compiler)


class Products(TorchDispatchMode):
    """Counts those that are no part of a fused operation."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


# Products of a rank's own in backward, of the gradient of A and of B; the others are fused.
OWN_PRODUCTS = {
    "all_gather_matmul": (0, 1),
    "matmul_all_gather": (1, 1),
    "matmul_reduce_scatter": (0, 1),
    "matmul_all_reduce": (1, 1),
}


def frozen(ctx, name):
    """Of what has no gradient a rank computes none, and the others get theirs, whatever is frozen here."""
    W, ranks = ctx.num_ranks, name_of(ctx)
    a, b = (torch.ones(shape, device=ctx.device) for shape in ((4 * W, 6), (6, 5)))
    for learned in ((True, False), (False, True), (ctx.cur_rank == 0, True)):
        given = [x.clone().requires_grad_(wanted) for x, wanted in zip((a, b), learned, strict=True)]
        loss = getattr(functional, name)(*given, None, ranks).sum()
        with Products() as products:
            loss.backward()
        assert products.count == sum(n for n, wanted in zip(OWN_PRODUCTS[name], learned, strict=True) if wanted)
        assert [x.grad is not None for x in given] == list(learned)


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_is_frozen(ranks, name):
    ranks.run(frozen, name)


def of_a_vector(ctx, name):
    x = torch.ones(4, 4, device=ctx.device)
    for a, b in ((x[0], x), (x, x[0])):
        with pytest.raises(InvalidCollectiveError, match=rf"{name}\(\) with A .* and B .*: they are matrices"):
            getattr(functional, name)(a, b, None, name_of(ctx))


@pytest.mark.parametrize("name", OPERATIONS)
def test_operands_are_matrices(ranks, name):
    ranks.run(of_a_vector, name)


def of_the_world(ctx):
    """Of which the default group is another word."""
    ranks, x = name_of(ctx, dist.group.WORLD), torch.eye(4, device=ctx.device)
    torch.testing.assert_close(functional.matmul_all_reduce(x, x, None, ranks), ctx.num_ranks * x)
    with pytest.raises(InvalidGroupError, match="among all ranks of a context"):
        functional.matmul_all_reduce(x, x, None, name_of(ctx, dist.new_group()))


def test_ranks_of_the_default_group(ranks):
    ranks.run(of_the_world)
