"""torch.compile(mode="reduce-overhead"): graphs in one pool of memory, in which nothing may be left that is no result.

Each operator is used for the first time in what is about to be captured, and again after a graph break.
"""

import contextlib
import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import iris
import iris.distributed  # noqa: F401 (registers the backend)
from iris.ccl import functional as collectives
from iris.experts import ExpertsConfig
from iris.experts import functional as routing
from iris.inductor import operators, symm_mem
from iris.ops import functional

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there are no graphs without a GPU"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

M, K, N = 256, 128, 256
TURNS = 6


def moves(x, b, ranks, group):
    y = collectives.all_gather(x, ranks)
    y = collectives.reduce_scatter(y, ranks, "avg")
    y = collectives.all_to_all(y, ranks)
    y = collectives.broadcast(y, ranks, 1)
    return collectives.all_reduce(y, ranks) + collectives.reduce(x, ranks, 0, "max")


def products(x, b, ranks, group):
    y = functional.matmul_all_reduce(x, b, None, ranks) / 64
    y = functional.all_gather_matmul(y[:, :K].contiguous(), b, None, ranks) / 64
    y = functional.matmul_reduce_scatter(y[:, :K].contiguous(), b, None, ranks) / 64
    y = functional.matmul_all_gather(y[:, :K].contiguous(), b, None, ranks)[:M, :K] / 64
    whole = b.repeat(dist.get_world_size(group), 1)
    return functional.all_gather_matmul_k(y.contiguous(), whole, None, ranks)[:, :K] / 64


def rows_besides(x, b, ranks, group):
    y, rows = functional.all_gather_matmul_return_a(x, b, b[0], ranks)
    return y[-M:, :K] / 64 + rows[:M]


def scaled(x, b, ranks, group):
    """Of fp8, with a factor for all, or for each row and column."""
    narrow = [each.to(torch.float8_e4m3fn) for each in (x, b.t().contiguous())]
    a, b, factor = narrow[0], narrow[1].t(), torch.full((1,), 1 / 64, device=x.device)
    y = functional.matmul_all_reduce(a, b, None, ranks, factor)
    y = y + functional.all_gather_matmul(a, b, None, ranks, scale_b=factor.expand(1, N).contiguous())[:M]
    return y[:, :K].contiguous()


def choices(x, size):
    """Of two experts for each token, with their weights."""
    ids = (3 * torch.arange(M, device=x.device)[:, None] + torch.arange(2, device=x.device)) % (2 * size)
    return ids, torch.linspace(0, 1, 2 * M, device=x.device).view(M, 2)


def experts(x, b, ranks, group):
    up = torch.stack([b.t(), b.t() / 2]).contiguous()
    down = torch.stack([b[:, : N // 2], -b[:, : N // 2]]).contiguous()
    ids, weights = choices(x, dist.get_world_size(group))
    return functional.experts_mlp(x, ids, weights, up / 16, down / 16, EXPERTS[ranks])


def tokens(x, b, ranks, group):
    """To experts, which multiply, and back."""
    ids, weights = choices(x, dist.get_world_size(group))
    rows, _, _ = routing.dispatch(x, ids, EXPERTS[ranks])
    return routing.combine(rows @ b[:, :K] / 16, ids, weights, EXPERTS[ranks])


@contextlib.contextmanager
def layers_of_experts(use, *contexts):
    """One of each context, by the names of the ranks, for what uses them."""
    made = []
    if use in (experts, tokens, routed):
        config = ExpertsConfig(layouts=("compact",))
        for ctx in contexts:
            made.append(ctx.experts(num_experts=2 * ctx.num_ranks, hidden=K, max_tokens=M, top_k=2, config=config))
            EXPERTS[collectives.name_of(ctx)] = routing.name_of(made[-1])
    yield
    for each in made:
        each.close()


def norms(x, b, ranks, group):
    y, total = functional.all_reduce_rms_norm(x, b[0, :K], x, 1e-6, ranks)
    rows, _, scales = functional.all_reduce_rms_norm_by_row(y, b[0, :K], None, 1e-6, ranks, torch.float8_e4m3fn)
    return y + total / 8 + (rows.float() * scales).to(x.dtype)


def norms_in_place(x, b, ranks, group):
    """As graphs have them, where the residual becomes the sum."""
    sums = [x * 2, x + 1]
    y = operators.all_reduce_add_rms_norm(x, b[0, :K], sums[0], 1e-6, ranks, x.dtype)
    rows, scales = operators.all_reduce_add_rms_norm_by_row(y, b[0, :K], sums[1], 1e-6, ranks, torch.float8_e4m3fn)
    return y + (rows.float() * scales).to(x.dtype) + (sums[0] + sums[1]) / 8


def of_symm_mem(x, b, ranks, group):
    """torch's own fused operators, on Iris."""
    name, ops = GROUPS[ranks], torch.ops.symm_mem
    rows, (y,) = ops.fused_all_gather_matmul(x, [b], 0, name)
    y = ops.fused_matmul_reduce_scatter(y[:, :K].contiguous() / 64, b, "sum", 0, name)[:, :K] / 64
    narrow = [each.to(torch.float8_e4m3fn) for each in (y.contiguous(), b.t().contiguous())]
    one = torch.ones(1, device=x.device)
    given = (narrow[0], [narrow[1].t()], one, [one], 0, name, [None], [None], [x.dtype], [False])
    _, (y,) = ops.fused_all_gather_scaled_matmul(*given)
    given = (narrow[0].repeat(dist.get_world_size(group), 1), narrow[1].t(), one, one, "sum", 0, 0, name)
    z = ops.fused_scaled_matmul_reduce_scatter(*given, [given[0].shape[0], N], None, None, x.dtype)
    return (y[:M, :K] + z[:, :K]) / 64 + rows[:M]


def of_torch(x, b, ranks, group):
    size = dist.get_world_size(group)
    y = funcol.all_reduce(x, "sum", group)
    y = funcol.all_gather_tensor(y, 0, group)
    y = funcol.reduce_scatter_tensor(y, "avg", 0, group)
    # Another number of rows for each rank.
    rank, share = dist.get_rank(group), M // size - size
    send, receive = [share + peer - rank for peer in range(size)], [share + rank - peer for peer in range(size)]
    y = funcol.all_to_all_single(y[: sum(send)], receive, send, group)
    return torch.nn.functional.pad(y, (0, 0, 0, M - y.shape[0]))


def in_place(x, b, ranks, group):
    y = x * 3
    dist.all_reduce(y, group=group)
    return y


USES = {"collectives": moves, "products": products, "rows besides": rows_besides, "scaled": scaled, "experts": experts}
USES |= {"tokens": tokens, "norms": norms, "norms in place": norms_in_place, "torch.ops.symm_mem": of_symm_mem}
USES |= {"torch.distributed": of_torch, "in place": in_place}
# Names of experts, and of process groups, by those of the ranks that have them.
EXPERTS, GROUPS = {}, {}
# Once in a process.
put_in_place = functools.cache(symm_mem.put_in_place)


def twice(use, x, b, ranks, group):
    y = use(x * 2, b, ranks, group)
    torch._dynamo.graph_break()
    return use(y + 1, b, ranks, group) - x


def compare(ctx, name):
    use = USES[name]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    if use is of_symm_mem:
        put_in_place()
    group = dist.new_group(backend="cuda:iris")
    eager_group = dist.new_group(backend="cuda:iris")
    b = torch.linspace(-1, 1, K * N, device=ctx.device).view(K, N).to(torch.bfloat16)
    with iris.iris(1 << 20) as fresh, layers_of_experts(use, fresh, ctx):
        ranks, eager_ranks = collectives.name_of(fresh), collectives.name_of(ctx)
        GROUPS.update({ranks: group.group_name, eager_ranks: eager_group.group_name})
        compiled = torch.compile(functools.partial(twice, use), mode="reduce-overhead")
        for turn in range(TURNS):
            x = ((torch.arange(M * K, device=ctx.device).view(M, K) + turn) % 7 - ctx.cur_rank).to(torch.bfloat16)
            torch.compiler.cudagraph_mark_step_begin()
            got = compiled(x, b, ranks, group).clone()
            want = twice(use, x, b, eager_ranks, eager_group)
            assert_near(got, want)
        ctx.barrier()
        assert_recorded(ctx.device.index)
        torch._dynamo.reset()


def assert_near(got, want):
    """But for what the compiler rounds elsewhere; of another turn's or rank's data nothing would be near."""
    error = torch.linalg.vector_norm(got.double() - want.double()) / torch.linalg.vector_norm(want.double())
    assert error < 0.03, error.item()


def assert_recorded(device):
    """That there were graphs: torch goes without them where it finds a reason to."""
    from torch._inductor.cudagraph_trees import get_manager

    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
    assert get_manager(device, create_if_none_exists=False).roots


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", USES)
def test_an_operator_is_first_used_in_a_graph_of_the_tree(ranks, name):
    ranks.run(compare, name)


def by_rows(x, b, ranks):
    y = functional.all_gather_matmul(x, b, None, ranks)
    torch._dynamo.graph_break()
    return functional.matmul_reduce_scatter(torch.tanh(y), b.t().contiguous(), None, ranks)


def by_columns(x, b, ranks):
    whole = b.repeat(collectives.size_of(ranks), 1)
    y = functional.all_gather_matmul_k(x, whole, None, ranks)
    torch._dynamo.graph_break()
    return functional.matmul_all_reduce(torch.tanh(y), b.t().contiguous(), None, ranks)


def with_rows(x, b, ranks):
    y, rows = functional.all_gather_matmul_return_a(x, b, None, ranks)
    torch._dynamo.graph_break()
    products = functional.matmul_all_gather(torch.tanh(y), b.t().contiguous(), None, ranks)
    return products.view(-1, *rows.shape).sum(0) + rows


def normalised(x, b, ranks):
    y, total = functional.all_reduce_rms_norm(x, b[0, :K], x, 1e-6, ranks)
    torch._dynamo.graph_break()
    return y * torch.tanh(total)


def routed(x, b, ranks):
    ids, weights = choices(x, collectives.size_of(ranks))
    rows, _, _ = routing.dispatch(x, ids, EXPERTS[ranks])
    torch._dynamo.graph_break()
    return routing.combine(torch.tanh(rows @ b[:, :K]), ids, weights, EXPERTS[ranks])


STEPS = {"rows": by_rows, "columns": by_columns, "with rows": with_rows, "normalised": normalised, "routed": routed}


def train(ctx, name):
    """Forward and backward, whose graphs are recorded by autograd's thread."""
    step = STEPS[name]
    torch._dynamo.reset()
    weight = torch.linspace(-1, 1, K * N, device=ctx.device).view(K, N).to(torch.bfloat16)

    with iris.iris(1 << 20) as fresh, layers_of_experts(step, fresh, ctx):
        compiled = torch.compile(step, mode="reduce-overhead")
        for turn in range(TURNS):
            x = ((torch.arange(M * K, device=ctx.device).view(M, K) + turn) % 7 - ctx.cur_rank).to(torch.bfloat16) / 8
            gradients = []
            for run, of in ((compiled, fresh), (step, ctx)):
                b, given = weight.clone().requires_grad_(), x.clone().requires_grad_()
                torch.compiler.cudagraph_mark_step_begin()
                run(given, b, collectives.name_of(of)).float().square().mean().backward()
                gradients.append((given.grad.clone(), b.grad.clone()))
            for got, want in zip(*gradients, strict=True):
                assert_near(got, want)
        ctx.barrier()
        assert_recorded(ctx.device.index)
        torch._dynamo.reset()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", STEPS)
def test_gradients_of_operators_are_recorded_too(ranks, name):
    ranks.run(train, name)
