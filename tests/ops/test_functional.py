"""Fused operations as operators: torch.compile keeps them in one graph, with the gradients of plain torch."""

import pytest
import torch

from iris.ccl.functional import name_of
from iris.ops import functional

M, N, K = 6, 5, 7  # rows of a rank's share


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


@pytest.mark.ranks(2)
@pytest.mark.parametrize("compiler", [None, "aot_eager"])
@pytest.mark.parametrize(
    "name", ["all_gather_matmul", "matmul_all_gather", "matmul_reduce_scatter", "matmul_all_reduce"]
)
def test_results_and_gradients(ranks, name, compiler):
    ranks.run(compare, name, compiler)
