"""torch.compile(mode="reduce-overhead"): graphs in one pool of memory, in which nothing may be left that is no result.

Each operator is used for the first time in what is about to be captured, and again behind a graph break.
"""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import iris
import iris.distributed  # noqa: F401 (registers the backend)
from iris.ccl import functional as collectives
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


def norms(x, b, ranks, group):
    y, total = functional.all_reduce_rms_norm(x, b[0, :K], x, 1e-6, ranks)
    rows, _, scales = functional.all_reduce_rms_norm_by_row(y, b[0, :K], None, 1e-6, ranks, torch.float8_e4m3fn)
    return y + total / 8 + (rows.float() * scales).to(x.dtype)


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


USES = {"collectives": moves, "products": products, "norms": norms, "torch.distributed": of_torch, "in place": in_place}


def twice(use, x, b, ranks, group):
    y = use(x * 2, b, ranks, group)
    torch._dynamo.graph_break()
    return use(y + 1, b, ranks, group) - x


def compare(ctx, name):
    use = USES[name]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    group = dist.new_group(backend="cuda:iris")
    eager_group = dist.new_group(backend="cuda:iris")
    b = torch.linspace(-1, 1, K * N, device=ctx.device).view(K, N).to(torch.bfloat16)
    with iris.iris(1 << 20) as fresh:
        ranks, eager_ranks = collectives.name_of(fresh), collectives.name_of(ctx)
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


def train(ctx):
    """Forward and backward, whose graphs are recorded by autograd's thread."""
    torch._dynamo.reset()
    weight = torch.linspace(-1, 1, K * N, device=ctx.device).view(K, N).to(torch.bfloat16)

    def step(x, b, ranks):
        y = functional.all_gather_matmul(x, b, None, ranks)
        torch._dynamo.graph_break()
        return functional.matmul_reduce_scatter(torch.tanh(y), b.t().contiguous(), None, ranks)

    with iris.iris(1 << 20) as fresh:
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
def test_gradients_of_operators_are_recorded_too(ranks):
    ranks.run(train)
