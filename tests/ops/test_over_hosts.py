"""Fused operations over hosts: whole numbers, whose sums are exact however often they are rounded."""

from unittest import mock

import pytest
import torch
from covering import sample
from rank_pool import FEWER_HOSTS, HOSTS, Hosts

from iris.ccl import functional as collectives
from iris.ccl.cluster import Cluster
from iris.ccl.select_over_hosts import as_found
from iris.errors import InvalidCollectiveError, SeveralHostsError
from iris.ops import FusedConfig, functional
from iris.ops.beside_rails import leaving_room, loop
from iris.ops.call import Call
from ops import test_rounds as rounds
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


def log_steps(ctx, name, beside):
    """A call's products and transfers, in their order: to which host, how far on, on how many programs."""
    log, (size, ops) = [], (ctx.num_ranks, ctx.ops)
    shift, run, rail = ops._rail.shift, ops.within._run, ops._rail

    def noted_shift(output, input, distance, what):
        log.append(f"send {distance}")
        wait = shift(output, input, distance, what)

        def noted_wait():
            wait()
            log.append(f"got {distance}")

        return noted_wait

    def noted_run(call, config, *more):
        log.append(f"multiply{'' if config is None else f' on {config.num_sms}'}")
        return run(call, config, *more)

    m = size if name == "matmul_reduce_scatter" else 1
    out, a, b = (torch.ones(shape, device=ctx.device) for shape in ((size // m, 3), (m, 2), (2, 3)))
    with (
        mock.patch.object(rail, "shift", noted_shift),
        mock.patch.object(ops.within, "_run", noted_run),
        mock.patch.object(ops, "beside_rails", beside),
    ):
        getattr(ops, name)(out, a, b)
    assert out.unique().tolist() == [2 * m]
    ctx.barrier()
    return log


# Of 2, 3 and 4 hosts. What runs while a transfer is under way leaves it room: it has few of the simulator's programs.
GATHERS = {
    2: "send 1, multiply on 2, got 1, multiply",
    3: "send 1, send 2, multiply on 2, got 1, multiply on 2, got 2, multiply",
    4: "send 1, send 2, multiply on 2, got 1, multiply on 2, send 3, got 2, multiply on 2, got 3, multiply",
}
SUMS = {
    2: "multiply, send 1, multiply on 2, got 1",
    3: "multiply, send 1, multiply on 2, send 2, multiply on 2, got 1, got 2",
    4: "multiply, send 1, multiply on 2, send 2, got 1, multiply on 2, send 3, multiply on 2, got 2, got 3",
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has more programs, and the same order")
@pytest.mark.ranks(Hosts(2, 2, dealt=True), Hosts(3, 2), Hosts(4, 1))
@pytest.mark.parametrize(("name", "orders"), [("all_gather_matmul", GATHERS), ("matmul_reduce_scatter", SUMS)])
def test_products_run_beside_rails(ranks, name, orders):
    for log in ranks.run(log_steps, name, None):
        assert log == orders[ranks.hosts.hosts].split(", ")
    for log in ranks.run(log_steps, name, False):
        assert "multiply on 2" not in log
        begun = [number for number, entry in enumerate(log) if entry.startswith("send")]
        assert [log[number + 1] for number in begun] == [log[number].replace("send", "got") for number in begun]


@pytest.mark.parametrize(
    ("given", "programs", "left"), [(None, 132, 96), (64, 132, 64), (120, 132, 96), (None, 304, 268), (None, 1, None)]
)
def test_a_product_beside_a_rail_leaves_it_room(given, programs, left):
    assert leaving_room(FusedConfig(num_sms=given), programs).num_sms == left


# GB/s to other hosts, and columns of B on each rank, of 8192 rows and K = 8192 on 2 hosts of 8.
@pytest.mark.parametrize(
    ("network", "columns", "expected"), [(50, 1792, True), (50, 8192, False), (400, 3584, False), (5, 8192, True)]
)
def test_products_run_beside_rails_where_that_takes_less_time(network, columns, expected):
    choice, rows = as_found(2, 8, "NVIDIA H200")._replace(cluster=Cluster(2, 8, network)), 8192 // 16
    here = loop(choice, rows * 8192 * 2, 2.0 * 16 * rows * 8192 * columns, 2)
    assert here.pays(choice.cluster, choice.host) == expected


def choose(ctx, name, network, asked=""):
    """Whether the vendor carries a call of 8192 x 28672 x 8192 on 2 hosts of 8 H200 with such a network."""
    cluster, size = Cluster(2, 8, network), 16
    choice = as_found(2, 8, "NVIDIA H200")._replace(cluster=cluster, simulated=False, asked=asked)
    gathers = name == "all_gather_matmul"
    rows, depth, columns = (8192 // size, 8192, 28672 // size) if gathers else (8192, 8192 // size, 28672)
    if name == "odd":
        rows, name = 8191, "matmul_all_reduce"
    out = torch.empty(rows // size if "scatter" in name else rows * size if gathers else rows, columns, device="meta")
    a, b = torch.empty(rows, depth, device="meta"), torch.empty(depth, columns, device="meta")
    call = Call(name, out.bfloat16(), a.bfloat16(), b.bfloat16(), None, None, None)
    with mock.patch.object(type(ctx.ops), "_choice", choice):
        return ctx.ops._is_the_vendors(call)


@pytest.mark.ranks(Hosts(2, 2, dealt=True))
@pytest.mark.parametrize(
    ("name", "network", "asked", "expected"),
    [
        ("all_gather_matmul", 50, "", False),
        ("all_gather_matmul", 50, "vendor", True),
        ("matmul_reduce_scatter", 50, "", False),
        ("matmul_all_reduce", 50, "", False),
        ("matmul_all_reduce", 25, "", True),
        ("matmul_all_reduce", 25, "iris", False),
        ("matmul_all_gather", 50, "iris", True),  # of which there is no loop
        ("odd", 50, "iris", True),  # whose rows the ranks cannot share
    ],
)
def test_the_vendor_carries_what_it_is_faster_at(ranks, name, network, asked, expected):
    assert ranks.run(choose, name, network, asked) == [expected] * ranks.num_ranks


ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there are no streams or graphs without a GPU")
CARRIED = ["triton", "copies", "vendor"]


def play(ctx, name, config, beside, replayed):
    with mock.patch.object(ctx.ops, "beside_rails", beside):
        (rounds.replay if replayed else rounds.play)(ctx, name, config)


@pytest.mark.ranks(*HOSTS)
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("config", CARRIED)
@pytest.mark.parametrize("beside", [True, False])
def test_rounds_beside_rails_and_in_turn(ranks, name, config, beside):
    """Other data each time, and a rank that comes late, another one each time."""
    ranks.run(play, name, config, beside, False)


@ON_GPU
@pytest.mark.ranks(Hosts(2, 1))
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("config", CARRIED)
@pytest.mark.parametrize("beside", [True, False])
def test_replays_beside_rails_and_in_turn(ranks, name, config, beside):
    ranks.run(play, name, config, beside, True)


def by_turns_on_two_streams(ctx, name, config):
    """A product on one stream comes after that on the other, as on one host."""
    data, streams = rounds.Round(ctx, name), [torch.cuda.Stream() for _ in range(2)]
    wrong = torch.zeros((), dtype=torch.int64, device=ctx.device)
    outs = [torch.empty(data.expected(0).shape, dtype=torch.bfloat16, device=ctx.device) for _ in streams]
    torch.cuda.synchronize()
    for number in range(200):
        stream, other = streams[number % 2], streams[1 - number % 2]
        stream.wait_stream(other)
        with torch.cuda.stream(stream):
            if number % 40 == ctx.cur_rank:
                torch.cuda._sleep(rounds.LATE)
            out = outs[number % 2]
            getattr(ctx.ops, name)(
                out, data.a(number, ctx.cur_rank), data.b[ctx.cur_rank], config=rounds.CONFIGS[config]
            )
            wrong += (out.float() != data.expected(number)).sum()
    ctx.barrier()
    assert wrong.item() == 0


@ON_GPU
@pytest.mark.ranks(Hosts(2, 1))
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("config", CARRIED)
def test_products_on_two_streams(ranks, name, config):
    ranks.run(by_turns_on_two_streams, name, config)


def gather_columns(ctx):
    """One product of what all ranks have, so that the sum is rounded once."""
    size, rank = ctx.num_ranks, ctx.cur_rank
    a = [torch.randn(5, 3, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    b = torch.randn(3 * size, 4, generator=torch.Generator().manual_seed(99))
    out = torch.empty(5, 4, device=ctx.device)
    ctx.ops.all_gather_matmul(out, a[rank].to(ctx.device), b.to(ctx.device), gather_dim="k")
    torch.testing.assert_close(out.cpu(), torch.cat(a, 1) @ b)


@pytest.mark.ranks(*FEWER_HOSTS)
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
    """The sum is that of all_reduce, bit by bit; after it is the kernel of one host."""
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


@pytest.mark.ranks(*FEWER_HOSTS)
def test_a_norm_after_a_sum_over_hosts(ranks):
    ranks.run(normalise)


def ask_for_the_wrong(ctx):
    size = ctx.num_ranks
    a, b, out = (torch.ones(shape, device=ctx.device) for shape in ((size, 4), (4, 3), (size, 3)))
    with pytest.raises(InvalidCollectiveError, match=rf"of {size} ranks .*out has to be"):
        ctx.ops.all_gather_matmul(out, a, b)
    with pytest.raises(SeveralHostsError, match="config"):
        ctx.ops.matmul_all_reduce(out, a, b, config=FusedConfig())
    with pytest.raises(SeveralHostsError, match=r"ctx.ops.all_gather_matmul_preamble works among .* one host"):
        ctx.ops.all_gather_matmul_preamble(out[:, :1], a, b, gather_dim="k")
    with pytest.raises(SeveralHostsError, match="need one dtype"):
        ctx.ops.matmul_all_reduce(out, a.bfloat16(), b.bfloat16())
    work = ctx.ops.matmul_all_reduce(out, a, b, async_op=True)
    work.wait()
    assert out.unique().tolist() == [4 * size]


@pytest.mark.ranks(Hosts(2, 2))
def test_what_operations_over_hosts_refuse(ranks):
    ranks.run(ask_for_the_wrong)
