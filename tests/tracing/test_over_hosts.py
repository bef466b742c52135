"""Traces of several hosts: one clock for all, with its error; and what rails do, on rows of their own."""

import contextlib
import json
import threading
import time
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from covering import EVERYTHING
from rank_pool import FEWER_HOSTS, Hosts

import iris
from iris import TraceEvent, simulator
from iris.ops import FusedConfig
from iris.tracing import picture, summary
from tracing.test_command import check_format

needs_simulator = pytest.mark.skipif(not simulator.ACTIVE, reason="changes a simulated host")


def trace_collectives(ctx, folder):
    x, whole = ctx.full((6, 8 * ctx.num_ranks), 1.0 + ctx.cur_rank), ctx.empty(6 * ctx.num_ranks, 8 * ctx.num_ranks)
    part = ctx.empty(2, 5, dtype=torch.int16)
    parts = ctx.zeros(2 * ctx.num_ranks, 5, dtype=torch.int16)
    ctx.ccl.all_gather(whole, x)  # before anybody wants to know
    ctx.barrier()
    ctx.tracing.enable()
    ctx.ccl.all_gather(whole, x)
    ctx.ccl.reduce_scatter(part, parts)
    ctx.ccl.broadcast(x, 1)
    ctx.device_barrier()
    ctx.ccl.gather(parts if ctx.cur_rank == 0 else None, part, 0)
    path = ctx.tracing.export(f"{folder}/trace.json", merge=True)
    ctx.ccl.all_gather(whole, x)  # recording goes on, and what a trace sends is no part of it
    own = ctx.tracing.export(f"{folder}/own.json")
    ctx.barrier()
    return json.loads(path.read_text()), json.loads(own.read_text()), ctx.tracing.timeline()


def expected(hosts, rank):
    """(method, bytes to each, targets, sources) of a rank's transfers in `trace_collectives`, before it is exported."""
    host, size = hosts.host_of(rank), hosts.num_ranks
    local = hosts.ranks_of(host).index(rank)
    rail = [hosts.ranks_of(other)[local] for other in range(hosts.hosts)]
    others, rows, row = [other for other in rail if other != rank], 4 * 6 * 8 * size, 2 * 2 * 5
    found = [("all_gather", rows, others, others), ("all_to_all", row, others, others)]
    if 1 in rail:
        found.append(("broadcast", rows, others, []) if rank == 1 else ("broadcast", rows, [], [1]))
    found.append(("barrier", 0, others, others))
    if 0 in rail:
        of_host = row * hosts.ranks_each
        found.append(("gather", of_host, [], others) if rank == 0 else ("gather", of_host, [0], []))
    return found


def transfers_in(trace, rank):
    """(method, bytes to or from each, targets, sources) of each, in their order."""
    rails = [event for event in trace["traceEvents"] if event.get("cat") == "rail" and event["pid"] == rank]
    found = []
    for event in sorted(rails, key=lambda event: event["ts"]):
        ways = [
            (event["args"].get(f"{way} ranks", []), event["args"].get(f"bytes {way} each")) for way in ("to", "from")
        ]
        (nbytes,) = {nbytes for ranks, nbytes in ways if ranks}
        found.append((event["name"], nbytes, *(ranks for ranks, _ in ways)))
    return found


@pytest.mark.ranks(*FEWER_HOSTS)
def test_rails_are_rows_of_their_own_for_all_ranks_of_all_hosts(ranks, tmp_path):
    results = ranks.run(trace_collectives, str(tmp_path))
    hosts, traces = ranks.hosts, [trace for trace, _, _ in results]
    assert all(trace == traces[0] for trace in traces)
    check_format(traces[0])
    named = {(e["pid"], e["args"]["name"]) for e in traces[0]["traceEvents"] if e["name"] == "thread_name"}
    assert {(rank, "rail") for rank in range(hosts.num_ranks)} <= named
    for rank, (trace, own, timeline) in enumerate(results):
        assert transfers_in(trace, rank) == expected(hosts, rank)
        again = [*expected(hosts, rank), expected(hosts, rank)[0]]
        assert transfers_in(own, rank) == again
        sent = sum(event.bytes for event in timeline.events if event.rank == rank and event.transfer)
        assert sent == sum(each * len(targets) for _, each, targets, _ in again)


def elements(source, target):
    """Other ones for each pair of ranks, and none for some."""
    return (5 * source + 3 * target) % 7


def trace_unequal_parts(ctx, folder):
    size, me = ctx.num_ranks, ctx.cur_rank
    sends, comes = [elements(me, to) for to in range(size)], [elements(source, me) for source in range(size)]
    begins = [[sum(counts[:rank]) for rank in range(size)] for counts in (sends, comes)]
    ctx.tracing.enable()
    output, input = torch.zeros(max(sum(comes), 1)), torch.ones(max(sum(sends), 1))
    ctx.ccl.all_to_all_v(output.to(ctx.device), input.to(ctx.device), sends, begins[0], comes, begins[1])
    path = ctx.tracing.export(f"{folder}/trace.json", merge=True)
    return json.loads(path.read_text()), ctx.tracing.timeline()


@pytest.mark.ranks(*((Hosts(2, 2), Hosts(3, 2)) if EVERYTHING else (Hosts(2, 2),)))
def test_parts_of_unequal_size_are_shown_with_the_bytes_of_each(ranks, tmp_path):
    """In the file, in the table and in the picture."""
    hosts = ranks.hosts

    def on_rail(source, target):
        """Bytes from a rank to another one on its rail: what the target's host gets of the source."""
        return 4 * sum(elements(source, to) for to in hosts.ranks_of(hosts.host_of(target)))

    for trace, timeline in ranks.run(trace_unequal_parts, str(tmp_path)):
        for rank in range(ranks.num_ranks):
            local = hosts.ranks_of(hosts.host_of(rank)).index(rank)
            others = [hosts.ranks_of(host)[local] for host in range(hosts.hosts) if host != hosts.host_of(rank)]
            sent, received = [on_rail(rank, to) for to in others], [on_rail(source, rank) for source in others]
            (event,) = [event for event in timeline.events if event.rank == rank and event.name == "all_to_all_v"]
            assert event.transfer.targets == event.transfer.sources == tuple(others)
            assert event.transfer.sent == tuple(sent) and event.transfer.received == tuple(received)
            (shown,) = [e for e in trace["traceEvents"] if (e["pid"], e["name"]) == (rank, "all_to_all_v")]
            assert shown["args"]["bytes to each"] == (sent if len(set(sent)) > 1 else sent[0])
            assert shown["args"]["bytes from each"] == (received if len(set(received)) > 1 else received[0])
        only = replace(timeline, events=[event for event in timeline.events if event.name == "all_to_all_v"])
        pairs = {(each.source, each.target): each.bytes for each in summary.traffic(only)}
        expected = {
            (source, target): on_rail(source, target)
            for event in only.events
            for source, target in ((event.rank, target) for target in event.transfer.targets)
            if on_rail(source, target)
        }
        assert pairs == expected and len(set(expected.values())) > 1
        # Python on a machine with GPUs may be without matplotlib.
        if simulator.ACTIVE:
            picture.draw(only, tmp_path / "t.svg")
            text = (tmp_path / "t.svg").read_text()
        for rank in range(ranks.num_ranks) if simulator.ACTIVE else ():
            parts = [f"{nbytes} B to {target}" for (source, target), nbytes in expected.items() if source == rank]
            assert f"rank {rank} on host{hosts.host_of(rank)}, rail: {', '.join(parts)} " in text


def trace_a_product(ctx, folder):
    size = ctx.num_ranks
    out, a, b = (torch.ones(shape, device=ctx.device) for shape in ((size, 3), (1, 2), (2, 3)))
    ctx.tracing.enable()
    ctx.ops.all_gather_matmul(out, a, b, config=FusedConfig(block_size_m=16, block_size_n=16, block_size_k=16))
    path = ctx.tracing.export(f"{folder}/trace.json", merge=True)
    return json.loads(path.read_text()), ctx.tracing.timeline()


@pytest.mark.ranks(*FEWER_HOSTS)
def test_a_product_is_traced_with_what_goes_to_and_comes_from_one_host_after_the_other(ranks, tmp_path):
    hosts = ranks.hosts
    for trace, timeline in ranks.run(trace_a_product, str(tmp_path)):
        assert check_causes(timeline) == (hosts.hosts - 1) * hosts.num_ranks
        for rank in range(hosts.num_ranks):
            own = hosts.host_of(rank)
            local = hosts.ranks_of(own).index(rank)
            rail = [hosts.ranks_of(host)[local] for host in range(hosts.hosts)]
            assert transfers_in(trace, rank) == [
                ("shift", 8, [rail[(own + step) % len(rail)]], [rail[(own - step) % len(rail)]])
                for step in range(1, len(rail))
            ]


def names_of(trace):
    return {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}


@pytest.mark.ranks(*FEWER_HOSTS)
def test_the_file_says_how_well_the_clocks_of_hosts_agree(ranks, tmp_path):
    for trace, own, _ in ranks.run(trace_collectives, str(tmp_path)):
        about, hosts = trace["otherData"], ranks.hosts
        assert [each["name"] for each in about["hosts"]] == [f"host{host}" for host in range(hosts.hosts)]
        assert [each["ranks"] for each in about["hosts"]] == [hosts.ranks_of(host) for host in range(hosts.hosts)]
        assert about["hosts"][0]["clock_ahead_us"] == about["hosts"][0]["clock_error_us"] == [0, 0]
        for each in about["hosts"][1:]:
            assert all(0 < error < 1e6 for error in each["clock_error_us"])
            for rank in each["ranks"]:
                assert about["clock_error_us"][f"{rank}"] >= max(each["clock_error_us"])
                assert names_of(trace)[rank].endswith(f" on {each['name']})")
        (rank,) = names_of(own)
        assert [each["ranks"] for each in own["otherData"]["hosts"]] == [[rank]]


def check_causes(timeline, tolerance=0.0):
    """Nothing has arrived anywhere before it was sent: the n-th transfer of a rail is the same one on all its ranks."""
    by_rank = {}
    for event in timeline.events:
        if event.transfer:
            by_rank.setdefault(event.rank, []).append(event)
    pairs = 0
    for rank, events in by_rank.items():
        for event in events:
            for source in event.transfer.sources:
                others, number = by_rank[source], numbered(events, event)
                (cause,) = [other for other in others if numbered(others, other) == number]
                error = timeline.clock_error[rank] + timeline.clock_error[source] + tolerance
                assert event.ended >= cause.began - error, (event, cause)
                pairs += 1
    return pairs


def numbered(events, event):
    """Which one of its kind it is on the rail."""
    alike = [each for each in events if each.name == event.name]
    return event.name, alike.index(event)


@pytest.mark.thorough
@pytest.mark.ranks(*FEWER_HOSTS)
def test_what_arrives_was_sent_before(ranks, tmp_path):
    for _, _, timeline in ranks.run(trace_collectives, str(tmp_path)):
        assert check_causes(timeline) >= 3 * ranks.num_ranks


# Ahead by more than a trace takes, also beside many other programs.
AHEAD_NS, FASTER = 500_000_000_000, 0.02


def run_with_a_wrong_clock(ctx):
    """All of host 1 reads a clock that is ahead, and too fast. Returns what it was ahead by when it was compared."""
    right, start = time.monotonic_ns, time.monotonic_ns()

    def wrong():
        now = right()
        return now + AHEAD_NS + int((now - start) * FASTER)

    def true_time(local):
        return start + (local - AHEAD_NS - start) / (1 + FASTER)

    with mock.patch.object(time, "monotonic_ns", wrong) if ctx.host == 1 else contextlib.nullcontext():
        ctx.tracing.enable()
        x = ctx.ones(ctx.num_ranks)
        for _ in range(5):
            ctx.ccl.all_reduce(x, x)
            time.sleep(0.05)
        timeline = ctx.tracing.timeline()
    mine = timeline.hosts[ctx.cur_rank]
    compared = [(each, each.local_ns - true_time(each.local_ns)) for each in mine.compared]
    return timeline, compared if ctx.host == 1 and ctx.local_rank == 0 else None


@needs_simulator
@pytest.mark.ranks(*((Hosts(2, 2), Hosts(2, 3)) if EVERYTHING else (Hosts(2, 3),)))
def test_a_clock_that_is_ahead_and_drifts_is_found_and_corrected(ranks, mistaken):
    # The sanitizer, which `mistaken` keeps out, would read the wrong clock, too.
    results = ranks.run(run_with_a_wrong_clock)
    ((_, compared),) = [result for result in results if result[1]]
    for comparison, truth in compared:
        # While it is compared it drifts, by what 50 exchanges take at most.
        assert abs(comparison.ahead_ns - truth) <= comparison.error_ns + 1e9 * FASTER / 10
        assert comparison.error_ns < AHEAD_NS / 10
    assert compared[1][0].ahead_ns - compared[0][0].ahead_ns > 0
    for timeline, _ in results:
        assert check_causes(timeline) == 10 * ranks.num_ranks
        assert max(event.ended for event in timeline.events) < AHEAD_NS / 1e3 / 2


@triton.jit
def compute_kernel(context_tensor, x, BLOCK: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context_tensor, tracing=True)
    work = ctx.tracing.record_event_start(TraceEvent.compute)
    i = tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i) + 1)
    ctx.tracing.record_event_end(work)


class LateEngine:
    """What moves a rail's data, and says that they are there when it is told to: by `arrive`."""

    def __init__(self, engine):
        self._engine, self._there = engine, threading.Event()

    def __getattr__(self, name):
        start = getattr(self._engine, name)
        return lambda *args: start(*args) if name == "allgather" else self._late(start(*args))

    def _late(self, work):
        future = torch.futures.Future()

        def await_all():
            self._there.wait()
            work.wait()
            future.set_result(None)

        thread = threading.Thread(target=await_all)
        thread.start()
        late = mock.Mock()
        late.wait, late.is_completed, late.get_future = thread.join, lambda: not thread.is_alive(), lambda: future
        return late

    def arrive(self):
        """Also what begins later, as on rails that are late themselves."""
        self._there.set()


def compute_beside_a_rail(ctx):
    mine, x = ctx.full((100,), float(ctx.cur_rank)), ctx.zeros(64)
    everyone = ctx.empty(ctx.num_hosts, 100)
    rail = ctx._world.rail
    late = LateEngine(rail._engine)
    ctx.tracing.enable()
    with mock.patch.object(rail, "_engine", late):
        wait = rail.all_gather(everyone, mine, "a test")
        compute_kernel[(1,)](ctx.get_device_context(), x, 64)
        late.arrive()
        wait()
    assert everyone[:, 0].tolist() == list(rail._ranks)
    return ctx.tracing.timeline()


@needs_simulator
@pytest.mark.ranks(Hosts(2, 2))
def test_a_rail_and_a_kernel_are_shown_at_once(ranks):
    for timeline in ranks.run(compute_beside_a_rail):
        check_beside(timeline)
        for each in summary.overlaps(timeline):
            assert 0 < each.compute_us < each.communication_us
            assert each.both_us == pytest.approx(each.compute_us)
        pairs = [(each.source, each.target, each.bytes) for each in summary.traffic(timeline)]
        each_host = ranks.hosts.ranks_each
        assert pairs == [(rank, (rank + each_host) % ranks.num_ranks, 400) for rank in range(ranks.num_ranks)]


def check_beside(timeline):
    """On each rank a kernel ran during a transfer."""
    for rank in timeline.devices:
        rail, beside = sorted((event for event in timeline.events if event.rank == rank), key=lambda event: event.began)
        assert (rail.name, beside.name) == ("all_gather", "compute")
        assert rail.began < beside.began < beside.ended < rail.ended


def compute_beside_nccl(ctx, in_a_graph):
    """64 MiB to each host: more than a network brings while a kernel of one program computes."""
    mine, x = torch.full((1 << 24,), float(ctx.cur_rank), device=ctx.device), ctx.zeros(64)
    everyone, rail = mine.new_empty(ctx.num_hosts, 1 << 24), ctx._world.rail
    compute_kernel[(1,)](ctx.get_device_context(), x, 64)

    def call():
        wait = rail.all_gather(everyone, mine, "a test")
        compute_kernel[(1,)](ctx.get_device_context(), x, 64)
        wait()

    call()
    ctx.tracing.enable()
    run, graph = call, torch.cuda.CUDAGraph()
    if in_a_graph:
        with torch.cuda.graph(graph):
            call()
        run = graph.replay
    timelines = []
    for _ in range(3):
        ctx.tracing.reset()
        run()
        timelines.append(ctx.tracing.timeline())
    return timelines


@pytest.mark.skipif(simulator.ACTIVE, reason="of NCCL's rails")
@pytest.mark.parametrize("in_a_graph", [False, True])
@pytest.mark.ranks(Hosts(2, 1))
def test_a_rail_and_a_kernel_are_shown_at_once_on_gpus(ranks, in_a_graph):
    for timelines in ranks.run(compute_beside_nccl, in_a_graph):
        for timeline in timelines:
            check_beside(timeline)
            assert check_causes(timeline) == ranks.num_ranks


def trace_groups(ctx):
    """A group has a rail of its own, made before or after `enable`."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine, x = groups[ctx.cur_rank % 2], ctx.ones(2)
    ctx.tracing.enable()
    ctx.ccl.all_gather(ctx.empty(4), x, group=mine)
    timeline = ctx.tracing.timeline()
    for group in groups:
        if group is mine:
            dist.destroy_process_group(group)
    return timeline


@pytest.mark.ranks(Hosts(2, 2), exactly=True)
def test_groups_have_rails_in_the_trace(ranks):
    for timeline in ranks.run(trace_groups):
        found = [(e.rank, e.name, e.target, e.bytes) for e in timeline.events if e.transfer]
        assert found == [(rank, "all_gather", rank ^ 2, 8) for rank in range(4)]
