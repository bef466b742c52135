"""Calls in CUDA graphs: those of graphs that never run at once share memory, others have their own."""

import gc
import random
import weakref
from unittest import mock

import pytest
import torch

import iris
from iris.cuda_graphs import capture
from iris.cuda_graphs.capture import GraphLine, Lines

ON_GPU = torch.cuda.is_available()
needs_graphs = pytest.mark.skipif(not ON_GPU, reason="there are no CUDA graphs without a GPU")
MAIN, SIDE, OTHER = 100, 200, 300


@pytest.mark.parametrize(
    "calls, lines",
    [
        # Each call: capture, its pool, stream. None: torch has set up no pool.
        ([(1, "a", MAIN), (1, "a", MAIN)], [(0, 0), (0, 0)]),
        ([(1, "a", MAIN), (2, "b", MAIN), (3, None, MAIN)], [(0, 0), (0, 0), (0, 0)]),
        ([(1, "a", MAIN), (2, "a", OTHER), (3, "b", OTHER)], [(0, 0), (0, 0), (0, 0)]),
        ([(1, "a", MAIN), (2, "b", OTHER), (3, "b", MAIN), (4, "a", OTHER)], [(0, 0), (1, 0), (1, 0), (0, 0)]),
        ([(1, None, MAIN), (2, None, OTHER)], [(0, 0), (1, 0)]),
        ([(1, "a", MAIN), (1, "a", SIDE), (1, "a", MAIN), (2, "a", OTHER), (2, "a", SIDE)],
         [(0, 0), (0, 1), (0, 0), (0, 0), (0, 1)]),
        ([(1, "a", MAIN), (2, "b", OTHER), (1, "a", SIDE), (2, "b", SIDE)], [(0, 0), (1, 0), (0, 1), (1, 1)]),
    ],
    ids=["one graph", "one stream", "one pool", "pool before stream", "apart", "branches", "two at once"],
)  # fmt: skip
def test_which_graphs_share(monkeypatch, calls, lines):
    at = {}
    monkeypatch.setattr(capture, "capture_id", lambda stream: at["capture"])
    monkeypatch.setattr(capture, "capture_pool", lambda number: at["pool"])
    found, group = [], Lines()
    for at["capture"], at["pool"], stream in calls:
        found.append(group.find(stream))
    assert found == [GraphLine(*line) for line in lines]


def channels(ctx):
    """Of lines and streams: which share, what graphs give back, and what is left when there is no more."""
    workspace = ctx._workspaces[None]

    def place(line, size=5000):
        channel = workspace.channel("a test", line, size, slice(0))
        return channel.block.mapping.name, channel.block.begin + channel.begin

    lines = [None, 7, GraphLine(0, 0), GraphLine(0, 1), GraphLine(1, 0)]
    places = [place(line) for line in lines]
    assert len(set(places)) == len(lines) and places == [place(line) for line in lines]
    assert set(ctx._world.group.all_gather(tuple(places), "compare places")) == {tuple(places)}
    in_graph = workspace.channel("a test", lines[2], 0, slice(0)).memory
    assert in_graph.sum() == 0
    in_graph.fill_(ctx.cur_rank + 1)
    room = workspace.room
    workspace.release_captures()
    assert workspace.room > room and place(None) == places[0]
    again = workspace.channel("a test", lines[2], 5000, slice(0))
    # The same memory, cleared.
    assert again.memory.sum() == 0 and (again.block.mapping.name, again.begin + again.block.begin) in places
    with pytest.raises(iris.errors.ChannelsExhaustedError, match="may have for flags"):
        place(8, workspace.limit)


@pytest.mark.ranks(1, 2, 3)
def test_channels(ranks):
    ranks.run(channels)


def many(ctx, graphs, calls, replays):
    """Graphs of many sizes, some captured on streams of their own into one pool, replayed in any order among calls."""
    width, sizes = 1024, [1, 2, 4, *range(8, 257, 8)]
    with iris.iris(1 << 24) as own:
        x = torch.ones(max(sizes), width, device=own.device, dtype=torch.bfloat16)
        total, normal, gain = torch.empty_like(x), torch.empty_like(x), torch.ones_like(x[0])
        gathered = torch.empty(own.num_ranks * max(sizes), width, device=own.device, dtype=torch.bfloat16)
        wrong = torch.zeros((), dtype=torch.int64, device=own.device)

        def call(n, times):
            for _ in range(times // 2):
                own.ops.all_reduce_rms_norm(normal[:n], x[:n], gain)
                own.ccl.all_reduce(total[:n], x[:n])
            own.ccl.all_gather(gathered[: own.num_ranks * n], x[:n])
            own.device_barrier()

        for n in sizes:
            call(n, 2)
        own.barrier()
        pool, captured = torch.cuda.graph_pool_handle(), []
        workspace = own.ccl.communicator().workspace
        for number in range(graphs):
            graph, n = torch.cuda.CUDAGraph(), sizes[-1 - number % len(sizes)]
            with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.Stream() if number % 3 == 0 else None):
                call(n, calls)
            captured.append((n, graph))
            if number == len(sizes):
                room = workspace.room
        assert workspace.room == room
        order = random.Random(5)
        for turn in range(replays):
            n, graph = order.choice(captured)
            value = turn % 13 + 1
            x.fill_(value + own.cur_rank)
            if turn % 7 == 0:
                n = order.choice(sizes)
                call(n, 2)
            else:
                graph.replay()
            wanted = sum(value + rank for rank in range(own.num_ranks))
            wrong.add_((total[:n] != wanted).sum() + (normal[:n] - 1).abs().gt(0.02).sum())
            for rank in range(own.num_ranks):
                wrong.add_((gathered[rank * n : (rank + 1) * n] != value + rank).sum())
        assert wrong.item() == 0
        own.barrier()


@needs_graphs
def test_many_graphs_of_many_calls(ranks):
    ranks.run(many, 200, 100, 10_000)


def side_by_side(ctx):
    """Graphs of lines of their own, replayed on two streams at once, each on its own turn on each rank."""
    with iris.iris(1 << 24) as own:
        xs = [torch.ones(40_000, device=own.device) for _ in range(2)]
        own.ccl.all_reduce(xs[0], xs[0])
        own.barrier()
        streams, graphs = [torch.cuda.Stream() for _ in xs], []
        for x, stream in zip(xs, streams, strict=True):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                own.ccl.all_reduce(x, x)
                x.div_(own.num_ranks)
            graphs.append(graph)
        for x in xs:
            x.fill_(own.cur_rank + 1)
        torch.cuda.synchronize()
        own.barrier()
        for turn in range(1000):
            for which in (0, 1) if (turn + own.cur_rank) % 2 else (1, 0):
                with torch.cuda.stream(streams[which]):
                    graphs[which].replay()
        own.barrier()
        mean = (own.num_ranks + 1) / 2
        assert all((x == mean).all() for x in xs)


@needs_graphs
def test_graphs_that_run_at_once(ranks):
    ranks.run(side_by_side)


def first_of_a_size(ctx):
    """A group that was used before needs no call of the same size before a capture: it takes memory inside."""
    with iris.iris(1 << 20) as own:
        x = torch.full((3_000_000,), float(own.cur_rank), device=own.device)
        own.ccl.all_reduce(x[:8], x[:8])
        own.barrier()
        for mode in ("global", "thread_local"):
            x.fill_(own.cur_rank)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode=mode):
                own.ccl.all_reduce(x, x)
            assert (x == own.cur_rank).all()
            graph.replay()
            assert (x == sum(range(own.num_ranks))).all()
        own.barrier()


@needs_graphs
def test_memory_that_is_taken_inside_a_capture(ranks):
    ranks.run(first_of_a_size)


def with_garbage(ctx):
    """A graph in a cycle of garbage, which is collected while a capture's first call asks where torch's memory lies."""
    read = torch.cuda.memory_snapshot

    def collect_and_read():
        gc.collect()
        return read()

    with iris.iris(1 << 20) as own, mock.patch.object(torch.cuda, "memory_snapshot", collect_and_read):
        x = torch.ones(100, device=own.device)
        own.ccl.all_reduce(x, x)
        graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
        with torch.cuda.graph(graphs[0]):
            own.ccl.all_reduce(x, x)
        freed = weakref.ref(graphs[0])
        graphs[0].itself = graphs[0]
        with torch.cuda.graph(graphs[1]):
            graphs[0] = None
            assert freed() is not None
            own.ccl.all_reduce(x, x)
            assert freed() is None
        graphs[1].replay()
        assert (x == own.num_ranks**2).all()
        own.barrier()


@needs_graphs
def test_old_graphs_that_are_collected_during_a_capture(ranks):
    ranks.run(with_garbage)
