"""What a rail by NCCL does on the host, with Gloo in the place of NCCL: there are no streams, and the host waits."""

import contextlib
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from patterns import assert_same_bits, pattern
from rank_pool import Hosts
from tracing.test_rail_times import stand_ins

from iris import simulator
from iris.errors import GroupAbortedError, MismatchedCollectiveError
from iris.tracing import rail_times
from iris.world import Group, Links, nccl_rail
from iris.world.rail import Transfer, rail_of, time_rails
from iris.world.store import own_client

pytestmark = pytest.mark.skipif(
    not simulator.ACTIVE, reason="on GPUs NCCL is there: tests/ccl/test_over_hosts_on_gpu.py"
)


class Engine:
    """Gloo with the methods of NCCL that end it. It tells how it was ended, and when."""

    def __init__(self, store, name, rank, ranks, timeout):
        self._gloo, self.ends = dist.ProcessGroupGloo(store, rank, len(ranks), timeout), []

    def __getattr__(self, name):
        return getattr(self._gloo, name)

    def abort(self):
        self.ends.append(("abort", time.monotonic()))

    def shutdown(self):
        self.ends.append(("shutdown", time.monotonic()))

    @property
    def how_ended(self):
        return [how for how, _ in self.ends]


@contextlib.contextmanager
def played(debug="0", capturing=False):
    """NCCL, and the parts of CUDA that a rail asks for."""
    with (
        mock.patch.object(nccl_rail.c10d, "make_nccl", Engine),
        mock.patch.object(nccl_rail, "is_current_stream_capturing", lambda: capturing),
        mock.patch.object(torch.cuda.nccl, "version", lambda: (2, 28, 9)),
        mock.patch.object(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None)),
        mock.patch.dict("os.environ", IRIS_DEBUG=debug),
    ):
        yield


@contextlib.contextmanager
def a_rail(ctx, debug="0", capturing=False):
    with played(debug, capturing):
        group, hosts = Group(ctx._world.group.process_group), ctx._world.hosts
        yield nccl_rail.NcclRail(group, hosts, rail_of(hosts), own_client(group.store), ctx.device)


def carry(ctx):
    with a_rail(ctx) as rail:
        assert rail.name == "NCCL 2.28.9"
        hosts, here = ctx.num_hosts, ctx.host
        every = [pattern((hosts, 5), torch.bfloat16, host) for host in range(hosts)]
        mine, whole = every[here], torch.empty(hosts, hosts, 5, dtype=torch.bfloat16)
        rail.all_gather(whole, mine, "a call")()
        assert_same_bits(whole, torch.stack(every))
        exchanged = torch.empty_like(mine)
        rail.all_to_all(exchanged, mine, "a call")()
        assert_same_bits(exchanged, torch.stack([each[here] for each in every]))
        for root in range(hosts):
            sent, collected, dealt = mine.clone(), torch.empty_like(whole), torch.empty_like(mine[0])
            rail.broadcast(sent, root, "a call")()
            rail.gather(collected if here == root else None, mine, root, "a call")()
            rail.scatter(dealt, mine if here == root else None, root, "a call")()
            assert_same_bits(sent, every[root])
            assert_same_bits(dealt, every[root][here])
            if here == root:
                assert_same_bits(collected, torch.stack(every))
        rail.barrier()
        rail.refuse("a call")
        engine = rail._engine
        rail.close()
        assert engine.how_ended == ["shutdown"]


@pytest.mark.ranks(Hosts(2, 2), Hosts(3, 2))
def test_a_rail_carries_each_kind_of_transfer(ranks):
    ranks.run(carry)


def time_each(ctx):
    """By kernels around each transfer, on streams that wait for it and for nothing else."""
    with a_rail(ctx) as rail, stand_ins():
        times = rail_times.StreamTimes(ctx.device)
        time_rails(rail._group, times)
        mine, everyone = torch.zeros(4), torch.empty(ctx.num_hosts, 4)
        rail.all_gather(everyone, mine, "a gather")()
        rail.broadcast(mine, 1, "a broadcast")()
        rail.barrier()
        rows, described, lost = times.recorded()
        rail.close()
    others = tuple(rank for rank in ctx._world.hosts.rail if rank != ctx.cur_rank)
    roots = () if ctx.host == 1 else (ctx._world.hosts.rail[1],)
    assert [of._replace(rail="") for of in described] == [
        Transfer("all_gather", "a gather", "", others, (16,), others, (16,)),
        Transfer(
            "broadcast", "a broadcast", "", *((others, (16,), (), ()) if ctx.host == 1 else ((), (), roots, (16,)))
        ),
        Transfer("barrier", "device_barrier()", "", others, (0,), others, (0,)),
    ]
    assert rows[:, 2].tolist() == [0, 1, 2] and lost == 0
    assert (rows[:, 0] < rows[:, 1]).all() and (rows[1:, 0] > rows[:-1, 1]).all()
    return rows[:, :2].tolist()


@pytest.mark.ranks(Hosts(2, 2))
def test_transfers_are_timed(ranks):
    results = ranks.run(time_each)
    for number in (0, 2):
        for rank, rows in enumerate(results):
            assert rows[number][1] >= results[(rank + 2) % 4][number][0]


def compare(ctx):
    with a_rail(ctx, debug="1") as rail:
        found = (MismatchedCollectiveError, GroupAbortedError)
        with pytest.raises(found, match="rank . on host0 calls .*; rank . on host1 calls "):
            rail.barrier() if ctx.host else rail.broadcast(torch.zeros(3), 0, "broadcast()")
        rail.close()


@pytest.mark.ranks(Hosts(2, 2))
def test_calls_are_compared_in_debug_mode(ranks):
    ranks.run(compare)


def send_and_receive(ctx, debug):
    """Each rank with one of another host, both ways, by communicators of the two; unequal sizes in debug mode."""
    group, hosts = Group(ctx._world.group.process_group), ctx._world.hosts
    links = Links(group, lambda route, store: nccl_rail.NcclRail(group, hosts, route, store, ctx.device))
    peer = ctx.num_ranks - 1 - ctx.cur_rank
    with played(debug):
        link = links.to(peer)
        for call in range(3):
            x, y = pattern((7,), torch.int32, ctx.cur_rank, call), torch.empty(7, dtype=torch.int32)
            link.send(x) if ctx.cur_rank < peer else link.recv(y)
            link.recv(y) if ctx.cur_rank < peer else link.send(x)
            assert_same_bits(y, pattern((7,), torch.int32, peer, call))
        engines = [rail._engine for rail in link._rails.values()]
        ctx.barrier()
        if debug == "1" and ctx.cur_rank in (0, ctx.num_ranks - 1):
            with pytest.raises((MismatchedCollectiveError, GroupAbortedError), match="of 28 bytes.* of 24 bytes"):
                link.send(x) if ctx.cur_rank < peer else link.recv(y[:6])
        links.close()
        broken = debug == "1" and ctx.cur_rank in (0, ctx.num_ranks - 1)
        assert [engine.how_ended for engine in engines] == 2 * [["abort"] if broken else ["shutdown"]]


@pytest.mark.ranks(Hosts(2, 2), Hosts(4, 1))
@pytest.mark.parametrize("debug", ["0", "1"])
def test_a_link_carries_messages_both_ways(ranks, debug):
    ranks.run(send_and_receive, debug)


def outlive(ctx):
    """A communicator that a graph was captured with is left to the end of the process, if a graph is there still."""
    for alive in (False, True):
        with a_rail(ctx, capturing=True) as rail:
            rail.barrier()
            engine = rail._engine
            with mock.patch.object(nccl_rail, "a_graph_lives", lambda alive=alive: alive):
                nccl_rail._close_all()
            assert engine.how_ended == ([] if alive else ["abort"])
            assert not nccl_rail._open and not nccl_rail._captured


@pytest.mark.ranks(Hosts(2, 1))
def test_graphs_outlive_a_rail(ranks):
    ranks.run(outlive)


def close_broken(ctx, late, limit_s=10.0):
    """Where ranks abort one after the other, torch ends the process of the later one."""
    with a_rail(ctx) as rail, mock.patch.object(nccl_rail, "CLOSING_LIMIT_S", limit_s):
        engine = rail._engine
        rail._group.break_off("a test")
        ctx.barrier()
        if ctx.cur_rank in late:
            time.sleep(1.0)
        rail.close()
    assert engine.how_ended == ["abort"]
    return engine.ends[0][1]


@pytest.mark.ranks(Hosts(3, 1))
def test_ranks_abort_a_broken_rail_together(ranks):
    times = ranks.run(close_broken, (1,))
    assert max(times) - min(times) < 0.2


@pytest.mark.ranks(Hosts(2, 1))
def test_who_does_not_close_a_broken_rail_is_not_waited_for_long(ranks):
    times = ranks.run(close_broken, (1,), 0.1)
    assert times[1] - times[0] > 0.5
