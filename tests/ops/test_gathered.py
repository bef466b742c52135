"""all_gather_matmul(gathered=...): the A of all ranks is left besides, bit for bit, for whoever multiplies it too."""

from unittest import mock

import pytest
import torch
from covering import EVERYTHING, sample, thorough
from rank_pool import FEWER_HOSTS

from iris.ccl.functional import name_of
from iris.errors import InvalidCollectiveError
from iris.ops import FusedConfig, functional, products
from iris.ops.hopper.arguments import Plan
from ops.plans import planned, short_chunks
from ops.products import CONFIGS, FP8, LAYOUTS, RANKS, matrix, place

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
WAYS = ["chosen", "fused", "few programs", "chiplets"]
SHAPES = [(32, 32, 64), (1, 1, 1), (23, 37, 45)]
# The columns that the Gluon kernel takes; of rows that are no whole tile its workspace has more than there are.
HOPPER_SHAPES = [(128, 64, 64), (47, 8, 8), (140, 72, 40)]
ROUNDS = 3


def check(ctx, gather_dim, shape, dtype, way, layout_a, layout, heap):
    """The next call, of other numbers, begins at once: no peer writes over what this one leaves."""
    W, rank, (M, N, K) = ctx.num_ranks, ctx.cur_rank, shape
    dim, whole = (0, (W * M, K)) if gather_dim == "m" else (1, (M, W * K))
    a = [[matrix(M, K, dtype, layout_a, 100 * call + r, ctx.device) for r in range(W)] for call in range(ROUNDS)]
    b = matrix(whole[1], N, dtype, "rows", 77, ctx.device)
    places = [place(*whole, dtype, layout, ctx.device, ctx if heap else None) for _ in range(ROUNDS)]
    outs = [torch.empty(whole[0], N, dtype=dtype, device=ctx.device) for _ in range(ROUNDS)]
    for out, given, (gathered, _) in zip(outs, a, places, strict=True):
        ctx.ops.all_gather_matmul(out, given[rank], b, gather_dim=gather_dim, gathered=gathered, config=CONFIGS[way])
    for out, given, (gathered, around) in zip(outs, a, places, strict=True):
        assert torch.equal(gathered, torch.cat(given, dim))
        assert around.count_nonzero() == gathered.count_nonzero()
        # The product is the same whether the A is kept or not.
        alone = torch.empty_like(out)
        ctx.ops.all_gather_matmul(alone, given[rank], b, gather_dim=gather_dim, config=CONFIGS[way])
        assert torch.equal(alone, out)
    ctx.barrier()


@pytest.mark.ranks(*RANKS)
@pytest.mark.parametrize("gather_dim", [thorough("m"), "k"])  # rows of all ranks are below, too
def test_rows_and_columns_of_all_ranks(ranks, gather_dim):
    ways = [*WAYS, "copies"] if gather_dim == "m" else WAYS
    for case in sample(SHAPES, DTYPES, ways, LAYOUTS, LAYOUTS, [False, True]):
        ranks.run(check, gather_dim, *case)


def check_hopper(ctx, plan, *case):
    with short_chunks(), planned(ctx, plan):
        check(ctx, "m", *case)


@pytest.mark.skipif(torch.version.hip is not None, reason="Hopper's kernel")
@pytest.mark.ranks(*RANKS)
def test_rows_that_copy_engines_send(ranks):
    shapes = HOPPER_SHAPES if EVERYTHING else HOPPER_SHAPES[1:]
    for plan, *case in sample([None, Plan(together=2)], shapes, DTYPES[:2], ["Hopper"], LAYOUTS, LAYOUTS, [False]):
        ranks.run(check_hopper, plan, *case)


def of_fp8(ctx, way):
    """As it is: the product is scaled, and what is gathered is not."""
    W, rank = ctx.num_ranks, ctx.cur_rank
    a = [matrix(16, 32, FP8[0], "rows", seed, ctx.device) for seed in range(W)]
    b = matrix(32, 16, FP8[0], "columns", 77, ctx.device)
    out = torch.empty(16 * W, 16, dtype=torch.bfloat16, device=ctx.device)
    gathered = torch.empty(16 * W, 32, dtype=FP8[0], device=ctx.device)
    factor = torch.full((1,), 0.5, device=ctx.device)
    ctx.ops.all_gather_matmul(out, a[rank], b, gathered=gathered, scale_a=factor, config=CONFIGS[way])
    assert torch.equal(gathered.view(torch.uint8), torch.cat(a).view(torch.uint8))
    expected = torch.cat(a).double() @ b.double() / 2
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize("way", ["chosen", "fused", "copies"])
def test_fp8(ranks, way):
    ranks.run(of_fp8, way)


def over_hosts(ctx, way):
    W, rank = ctx.num_ranks, ctx.cur_rank
    for call, layout in enumerate(LAYOUTS):
        a = [matrix(5, 9, torch.float32, layout, 100 * call + seed, ctx.device) for seed in range(W)]
        b = matrix(9, 7, torch.float32, "rows", 77, ctx.device)
        out, (gathered, around) = (
            torch.empty(5 * W, 7, device=ctx.device),
            place(5 * W, 9, torch.float32, layout, ctx.device),
        )
        ctx.ops.all_gather_matmul(out, a[rank], b, gathered=gathered, config=CONFIGS[way])
        assert torch.equal(gathered, torch.cat(a)) and around.count_nonzero() == gathered.count_nonzero()
        torch.testing.assert_close(out, torch.cat(a) @ b)


@pytest.mark.ranks(*FEWER_HOSTS)
@pytest.mark.parametrize("way", [thorough("chosen"), "fused"])
def test_over_hosts(ranks, way):
    ranks.run(over_hosts, way)


def prepared(ctx, kept, otherwise):
    """What is chosen may be another way where the A of all ranks is left: the workspace is for that one."""
    a = [matrix(8, 6, torch.float32, "rows", seed, ctx.device) for seed in range(ctx.num_ranks)]
    b, out = matrix(6, 4, torch.float32, "rows", 77, ctx.device), torch.empty(8 * ctx.num_ranks, 4, device=ctx.device)
    gathered = torch.zeros(8 * ctx.num_ranks, 6, device=ctx.device)

    def chosen(call, *_):
        return CONFIGS[otherwise if call.gathered is None else kept] or FusedConfig(variant="vendor")

    with mock.patch.object(products, "choose", chosen), mock.patch.object(ctx.ops, "_chosen", {}):
        for options in ({"gathered": gathered}, {}):
            workspace = ctx.ops.all_gather_matmul_preamble(out, a[ctx.cur_rank], b, **options)
            assert (workspace is None) == (CONFIGS[kept if options else otherwise] is None)
            ctx.ops.all_gather_matmul(out.zero_(), a[ctx.cur_rank], b, **options, workspace=workspace)
            torch.testing.assert_close(out, torch.cat(a) @ b)
            ctx.barrier()
            if workspace is not None:
                workspace.close()
        assert torch.equal(gathered, torch.cat(a))
        with pytest.raises(InvalidCollectiveError, match="gathered has to be"):
            ctx.ops.all_gather_matmul_preamble(out, a[ctx.cur_rank], b, gathered=gathered[1:])


@pytest.mark.parametrize(("kept", "otherwise"), [("fused", "chosen"), ("chosen", "fused"), ("copies", "fused")])
def test_a_workspace_is_for_what_is_chosen_where_rows_are_left(ranks, kept, otherwise):
    ranks.run(prepared, kept, otherwise)


MISUSES = {
    "rows": (r"gathered has to be \[16, 6\], of the dtype of A", (15, 6), {}),
    "dtype": (r"gathered has to be \[16, 6\], of the dtype of A", (16, 6), {"dtype": torch.float16}),
    "columns": (r"gathered has to be \[8, 12\], of the dtype of A", (16, 6), {"gather_dim": "k"}),
}


def misused(ctx, what):
    message, shape, options = MISUSES[what]
    gathered = torch.zeros(shape, dtype=options.get("dtype"), device=ctx.device)
    by_columns = "gather_dim" in options
    out, a, b = ctx.zeros(8 if by_columns else 16, 4), ctx.zeros(8, 6), ctx.zeros(12 if by_columns else 6, 4)
    with pytest.raises(InvalidCollectiveError, match=message):
        ctx.ops.all_gather_matmul(out, a, b, gathered=gathered, gather_dim="k" if by_columns else "m")


@pytest.mark.parametrize("what", MISUSES)
def test_what_does_not_fit_is_told(ranks, what):
    ranks.run(misused, what)


def misplaced(ctx):
    whole = torch.zeros(400, device=ctx.device)
    out, a, b, gathered = (
        whole[begin : begin + rows * columns].view(rows, columns)
        for begin, rows, columns in ((0, 16, 4), (64, 8, 6), (112, 6, 4), (136, 16, 6))
    )
    for meeting, name in ((out, "out"), (a, "A"), (b, "B")):
        first = meeting.storage_offset()
        with pytest.raises(InvalidCollectiveError, match=f"gathered and {name} overlap in memory"):
            ctx.ops.all_gather_matmul(
                out if name == "out" else torch.zeros_like(out),
                a if name == "A" else torch.zeros_like(a),
                b if name == "B" else torch.zeros_like(b),
                gathered=whole[first : first + 96].view(16, 6),
            )
    with pytest.raises(InvalidCollectiveError, match="elements of gathered are one place in memory"):
        ctx.ops.all_gather_matmul(out, a, b, gathered=whole[136:142].expand(16, 6))
    with pytest.raises(InvalidCollectiveError, match="B has no columns, so that no A is moved"):
        ctx.ops.all_gather_matmul(out[:, :0], a, b[:, :0], gathered=gathered)
    version = gathered._version
    ctx.ops.all_gather_matmul(out, a, b, gathered=gathered)
    assert gathered._version > version


def test_where_it_cannot_be(ranks):
    ranks.run(misplaced)


def compare(ctx, compiler, used):
    """Gradients of the product, of the rows, and of both, each by the weights of a rank."""
    torch.compiler.reset()
    W, me, ranks = ctx.num_ranks, ctx.cur_rank, name_of(ctx)
    generator = torch.Generator().manual_seed(11)
    a, b, bias, of_out, of_rows = (
        [torch.randn(shape, generator=generator).to(ctx.device) for _ in range(W)]
        for shape in ((6, 7), (7, 5), (5,), (6 * W, 5), (6 * W, 7))
    )
    given = [[each.clone().requires_grad_() for each in of_all] for of_all in (a, b, bias)]
    mine = [each[me].clone().requires_grad_() for each in (a, b, bias)]

    def function(x, y, z):
        out, rows = functional.all_gather_matmul_return_a(torch.sin(x), y, z, ranks)
        return 2 * out, torch.cos(rows)

    results = (torch.compile(function, backend=compiler, fullgraph=True) if compiler else function)(*mine)
    rows = torch.cat([torch.sin(x) for x in given[0]])
    expected = [(2 * (rows @ y + z), torch.cos(rows)) for y, z in zip(*given[1:], strict=True)]
    torch.testing.assert_close(results, expected[me])

    def loss(results, rank):
        weights = of_out[rank], of_rows[rank]
        return sum((results[i] * weights[i]).sum() for i in used)

    loss(results, me).backward()
    sum(loss(expected[rank], rank) for rank in range(W)).backward()
    for x, y in zip(mine, (each[me] for each in given), strict=True):
        # What nothing was computed of has no gradient, or compiled one of zeros.
        of_x, of_y = (torch.zeros_like(each) if each.grad is None else each.grad for each in (x, y))
        torch.testing.assert_close(of_x, of_y)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=["out", "rows", "both"])
@pytest.mark.parametrize("compiler", [None, "aot_eager", *(["inductor"] if EVERYTHING else [])])
def test_the_operator_and_its_gradients(ranks, compiler, used):
    ranks.run(compare, compiler, used)


def under_autocast(ctx):
    ranks, x = name_of(ctx), torch.eye(8, device=ctx.device)
    with torch.autocast(ctx.device.type, torch.bfloat16):
        out, rows = functional.all_gather_matmul_return_a(x, x, None, ranks)
    assert out.dtype == rows.dtype == torch.bfloat16 and torch.equal(rows, x.repeat(ctx.num_ranks, 1).bfloat16())


def test_autocast(ranks):
    ranks.run(under_autocast)
