"""Over several hosts the vendor's collective among all ranks: on request, where it was measured to be faster, or by
arithmetic. In the simulator it is Gloo's, and nothing but a request chooses it.
"""

import json
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from patterns import assert_same_bits
from rank_pool import Hosts

import iris
from ccl.calls import LAYOUTS, Arena, Case, data, perform, sample
from ccl.test_over_hosts import HOSTS
from iris.ccl import Config, ReduceOp, select_over_hosts
from iris.ccl.cluster import Cluster, HostFigures, ProductFigures
from iris.ccl.predict_over_hosts import LINK_GBPS, steps
from iris.ccl.select import Choice
from iris.ccl.select_over_hosts import HostChoice
from iris.ccl.vendor import Vendor
from iris.errors import InvalidConfigError, InvalidSettingError, PeerFailedError, UnsupportedReductionError

VENDOR, OURS = Config(over_hosts="vendor"), Config(over_hosts="iris")
MOVES = ["all_gather", "all_to_all", "broadcast"]
SUMS = ["all_reduce", "reduce_scatter", "reduce"]
SHAPES = [(0,), (1,), (7, 33), (3, 5, 17)]


def call_all(ctx, cases):
    arena = Arena(ctx.empty(32 << 20, dtype=torch.uint8))
    for call, case in enumerate(cases):
        by_vendor = getattr(Vendor, case.collective)
        with mock.patch.object(Vendor, case.collective, autospec=True, side_effect=by_vendor) as called:
            perform(ctx, arena, case, call)
        assert called.called or 0 in case.shape, case


def asked_for(cases):
    return [Case(**{**vars(case), "config": (("over_hosts", "vendor"),)}) for case in cases]


def cases(seed, number):
    moves = [
        Case(collective, shape, dtype, root=root, layout=layout)
        for collective in MOVES
        for shape, dtype, root, layout in sample(
            number, f"{seed} {collective}", SHAPES, [torch.uint8, torch.bool, torch.complex64], range(4), LAYOUTS
        )
    ]
    sums = [
        Case(collective, shape, dtype, op=op, root=root, layout=layout)
        for collective in SUMS
        for shape, dtype, op, root, layout in sample(
            number, f"{seed} {collective}", SHAPES, [torch.float32, torch.float64], ReduceOp, range(4), LAYOUTS
        )
    ]
    places = [Case(collective, (5, 4), torch.float32, in_place=True) for collective in ["all_gather", *SUMS]]
    return asked_for([*moves, *sums, *places])


@pytest.mark.ranks(*HOSTS)
def test_the_vendor_gives_the_same_results(ranks):
    ranks.run(call_all, cases("vendor", 6))


def call_in_a_group(ctx, members):
    group = dist.new_group(members)
    for call, dtype in enumerate((torch.float32, torch.float64) if ctx.cur_rank in members else ()):
        x = data((7,), dtype, ctx.cur_rank, call, ReduceOp.SUM).to(ctx.device)
        total, ours = torch.empty_like(x), torch.empty_like(x)
        ctx.ccl.all_reduce(total, x, group=group, config=VENDOR)
        ctx.ccl.all_reduce(ours, x, group=group, config=OURS)
        torch.testing.assert_close(total, ours)
    ctx.barrier()


@pytest.mark.ranks(Hosts(2, 2), Hosts(2, 3))
def test_a_group_has_a_communicator_of_its_own(ranks):
    ranks.run(call_in_a_group, sorted(rank for host in range(2) for rank in ranks.hosts.ranks_of(host)[-1:]))


def leave_inputs(ctx):
    """What is not the result stays as it is, on every rank."""
    x = data((9,), torch.float32, ctx.cur_rank, 3, ReduceOp.SUM).to(ctx.device)
    kept = x.clone()
    for root in range(ctx.num_ranks):
        ctx.ccl.reduce(torch.empty_like(x) if ctx.cur_rank == root else x, x, root, config=VENDOR)
        assert_same_bits(x, kept)


@pytest.mark.ranks(Hosts(2, 2), Hosts(4, 1))
def test_inputs_stay_as_they_are(ranks):
    ranks.run(leave_inputs)


def use_the_default(ctx):
    """In the simulator it is Iris', bit by bit, unless the environment asks for the vendor's."""
    with iris.iris(1 << 20) as other:
        x = data((65,), torch.bfloat16, ctx.cur_rank, 1, ReduceOp.SUM).to(ctx.device)
        plain, ours = torch.empty_like(x), torch.empty_like(x)
        other.ccl.all_reduce(plain, x)
        other.ccl.all_reduce(ours, x, config=OURS)
        assert_same_bits(plain, ours)
        assert not other._world.links.everyone_connected
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IRIS_OVER_HOSTS", "vendor")
        with iris.iris(1 << 20) as other:
            other.ccl.all_reduce(plain, x)
            assert other._world.links.everyone_connected
            torch.testing.assert_close(plain, ours, rtol=0, atol=0.05)  # of other roundings
            other.ccl.gather(plain.new_empty(65 * ctx.num_ranks) if ctx.cur_rank == 0 else None, plain, 0)
            largest = x.int() + ctx.cur_rank
            other.ccl.all_reduce(largest, largest.clone(), op=ReduceOp.MAX, config=OURS)
            each = [data((65,), torch.bfloat16, rank, 1, ReduceOp.SUM).int() + rank for rank in range(ctx.num_ranks)]
            assert torch.equal(largest.cpu(), torch.stack(each).amax(0))
        if ctx.cur_rank == 1:
            patch.setenv("IRIS_NETWORK_GBPS", "fast")
        with pytest.raises(InvalidSettingError if ctx.cur_rank == 1 else PeerFailedError, match="IRIS_NETWORK"):
            iris.iris(1 << 20)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs the faster one is chosen")
@pytest.mark.ranks(Hosts(2, 2), Hosts(4, 1))
def test_in_the_simulator_it_is_chosen_on_request_alone(ranks, mistaken):
    ranks.run(use_the_default)


def ask_for_the_impossible(ctx):
    x = torch.ones(2 * ctx.num_ranks, device=ctx.device)
    ones = [1] * ctx.num_ranks
    for call in (
        lambda: ctx.ccl.gather(torch.cat([x] * ctx.num_ranks), x, config=VENDOR),
        lambda: ctx.ccl.all_to_all_v(x.clone(), x, ones, ones, ones, ones, config=VENDOR),
    ):
        with pytest.raises(InvalidConfigError, match="the vendor's is not used there"):
            call()
    with pytest.raises(InvalidConfigError, match="the vendor rounds sums as it does"):
        ctx.ccl.all_reduce(x, x, config=Config(over_hosts="vendor", fp32_partials=True))
    with pytest.raises(UnsupportedReductionError, match="has no such sum"):
        ctx.ccl.all_reduce(x.bool(), x.bool(), config=VENDOR)
    with pytest.raises(InvalidConfigError, match="over_hosts is one of 'iris', 'vendor'"):
        Config(over_hosts="nccl")
    ctx.ccl.all_reduce(x, x, config=VENDOR)
    assert x.tolist() == [ctx.num_ranks] * len(x)


@pytest.mark.ranks(Hosts(2, 2))
def test_what_the_vendor_does_not_have_is_told(ranks, mistaken):
    ranks.run(ask_for_the_impossible)


# Within a host: GB/s of all_gather, reduce_scatter, a link and memory; and microseconds of the least that each takes.
HOST = HostFigures(290.0, 290.0, LINK_GBPS, 4917.0, 12.0, 46.0)


def choice(hosts, ranks_each, network=50.0, table=None, asked="", simulated=False):
    return HostChoice(
        Cluster(hosts, ranks_each, network), HOST, asked, simulated, table or {}, ProductFigures({}, {}, 0)
    )


def test_the_choice_follows_the_arithmetic():
    """The figures of all_reduce that others have measured; and where the network is slow, who sends less over it."""
    nbytes = 256 << 20
    _, vendor = choice(2, 8).predicted_us("all_reduce", nbytes)
    assert 2 * 15 / 16 * nbytes / vendor / 1e3 == pytest.approx(430, rel=0.05)
    _, vendor = choice(4, 8).predicted_us("all_reduce", nbytes)
    assert 2 * 31 / 32 * nbytes / vendor / 1e3 == pytest.approx(320, rel=0.05)
    ours, _ = choice(2, 8).predicted_us("all_reduce", nbytes)
    # In the host 2 * (7/8) of the bytes at 290 GB/s. Between hosts 1/8 of them, which takes less than the own half.
    in_host = 2 * 7 / 8 * nbytes / 290e3
    assert in_host < ours < 1.1 * in_host
    for hosts in (2, 4, 8):
        for collective in select_over_hosts.OF_VENDOR:
            assert choice(hosts, 8).of(collective, 4096) == "vendor"
    # A ring of all ranks sends 15/16 of the whole from each host, and a rail 1/2.
    for collective in ("all_gather", "reduce_scatter"):
        assert choice(2, 8).of(collective, nbytes) == "vendor"
        assert choice(2, 8, network=5.0).of(collective, nbytes) == "iris"
    assert choice(2, 8).of("all_reduce", nbytes) == "vendor"
    assert choice(2, 8, network=5.0).of("all_reduce", nbytes) == "vendor"
    assert choice(4, 8, network=5.0).of("all_reduce", nbytes) == "iris"


@pytest.mark.parametrize("collective", select_over_hosts.OF_VENDOR)
def test_one_rank_a_host_has_no_steps_within_it(collective):
    """So their figures make no difference, and nothing takes longer than the rail but the sum over hosts."""
    cluster = Cluster(4, 1, 50.0)
    alone = steps(collective, 1 << 20, cluster, HOST)
    slow = HOST._replace(all_gather_GBps=1e-9, reduce_scatter_GBps=1e-9, small_us=1e9)
    assert steps(collective, 1 << 20, cluster, slow) == alone
    summed = alone.total - alone.rail
    assert summed == pytest.approx(alone.in_host)
    assert (summed > 0) == (collective in SUMS) and summed < 2


def test_what_was_measured_comes_before_the_arithmetic(tmp_path, monkeypatch):
    measured = {"all_gather": [[4096, "iris", None], [None, "vendor", None]]}
    folder = tmp_path / "iris"
    folder.mkdir()
    (folder / "collectives.json").write_text(json.dumps({"a GPU": {"2x8": measured, "8": {}}}))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("IRIS_OVER_HOSTS", raising=False)
    found = select_over_hosts.as_found(2, 8, "a GPU")
    assert found.table == {"all_gather": [Choice(4096, "iris", None), Choice(None, "vendor", None)]}
    sent = select_over_hosts.as_received(select_over_hosts.as_sent(found))
    assert sent == found
    sent, found = (each._replace(simulated=False) for each in (sent, found))
    assert [sent.of("all_gather", nbytes) for nbytes in (4096, 4097)] == ["iris", "vendor"]
    assert select_over_hosts.as_found(4, 8, "a GPU").table == {}
    assert found._replace(asked="iris").of("all_gather", 1 << 30) == "iris"
    assert found._replace(simulated=True).of("all_gather", 1 << 30) == "iris"


@pytest.mark.parametrize("variable, text", [("IRIS_NETWORK_GBPS", "0"), ("IRIS_OVER_HOSTS", "nccl")])
def test_a_setting_that_is_none_is_told(monkeypatch, variable, text):
    monkeypatch.setenv(variable, text)
    with pytest.raises(InvalidSettingError, match=variable):
        select_over_hosts.as_found(2, 8, "a GPU")
