"""Collectives over hosts on GPUs: late ranks, streams and graphs, with memory between the steps that others take next.

Two GPUs of one machine count as two hosts: `make test-hosts`. NCCL moves data between them by TCP.
"""

import random
import time

import pytest
import torch
from rank_pool import Hosts

import iris
from ccl.test_chunks_over_hosts import in_chunks
from iris.errors import FirstUseInCaptureError

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there are no streams or graphs without a GPU"),
    pytest.mark.ranks(Hosts(2, 1), Hosts(2, 2, dealt=True)),
]

# Elements of bfloat16 of a rank's piece, and in how many chunks it goes.
SIZES = [(3, 1), (4096, 1), (300_000, 1), (4096, 4), (300_000, 4)]


def run_in_chunks(ctx, number, worker, *args):
    with in_chunks(ctx, number):
        worker(ctx, *args)


class Step:
    """Every collective once, on tensors that stay, and what must come out of it."""

    def __init__(self, ctx, n):
        def make(count):
            return torch.empty(count, dtype=torch.bfloat16, device=ctx.device)

        self.ctx, self.size, self.rank = ctx, ctx.num_ranks, ctx.cur_rank
        self.own, self.whole = make(n), make(n * self.size)
        self.gathered, self.exchanged, self.collected = (make(n * self.size) for _ in range(3))
        self.total, self.part, self.sent, self.dealt, self.reduced = (make(n) for _ in range(5))

    def fill(self, call):
        """Whole numbers, so that sums are exact; another one for each rank, call and place."""
        ranks = torch.arange(self.size, device=self.ctx.device)
        self.own.copy_((torch.arange(self.own.numel(), device=self.ctx.device) + call + 5 * self.rank) % 13)
        self.whole.view(self.size, -1).copy_((self.own + ranks[:, None]) % 13)

    def enqueue(self, root):
        ccl, here = self.ctx.ccl, self.rank == root
        ccl.all_gather(self.gathered, self.own)
        ccl.all_reduce(self.total, self.own)
        ccl.reduce_scatter(self.part, self.whole)
        ccl.all_to_all(self.exchanged, self.whole)
        self.sent.copy_(self.own)
        ccl.broadcast(self.sent, root)
        ccl.gather(self.collected if here else None, self.own, root)
        ccl.scatter(self.dealt, self.whole if here else None, root)
        ccl.reduce(self.reduced if here else None, self.own, root)

    def wrong(self, call, root):
        """How many elements are not what they should be, on the device; the host does not wait."""
        i = torch.arange(self.own.numel(), device=self.ctx.device)
        ranks = torch.arange(self.size, device=self.ctx.device)[:, None]
        everyone = (i + call + 5 * ranks) % 13
        mine = (everyone + self.rank) % 13
        results = [
            (self.gathered, everyone),
            (self.total, everyone.sum(0)),
            (self.part, mine.sum(0)),
            (self.exchanged, mine),
            (self.sent, everyone[root]),
            (self.dealt, mine[root]),
        ]
        if self.rank == root:
            results += [(self.collected, everyone), (self.reduced, everyone.sum(0))]
        return sum((actual.view(expected.shape) != expected).sum() for actual, expected in results)


def count_on(ctx):
    return torch.zeros((), dtype=torch.int64, device=ctx.device)


def capture(*enqueue):
    """A graph of each of these; their first calls were outside of it."""
    graphs = []
    for each in enqueue:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            each()
    return graphs


def overwrite(ctx, generator):
    """What a program does between its calls: it takes memory that others have let go of, and writes to it."""
    torch.full((generator.choice([100, 10_000, 1_000_000]),), 7.0, dtype=torch.bfloat16, device=ctx.device)


def skewed(ctx, n, rounds):
    """Each rank is late to some calls, by milliseconds, on the GPU and on the host."""
    step, generator, wrong = Step(ctx, n), random.Random(f"skew {ctx.cur_rank}"), count_on(ctx)
    for call in range(rounds):
        if generator.random() < 0.02:
            torch.cuda._sleep(generator.randrange(10_000_000))
        if generator.random() < 0.01:
            time.sleep(0.002)
        step.fill(call)
        step.enqueue(call % ctx.num_ranks)
        wrong += step.wrong(call, call % ctx.num_ranks)
        overwrite(ctx, generator)
    ctx.barrier()
    assert wrong.item() == 0


@pytest.mark.parametrize(("n", "number"), SIZES)
def test_late_ranks(ranks, n, number):
    rounds = {3: 2000, 4096: 300, 300_000: 50}[n]
    ranks.run(run_in_chunks, number, skewed, n, rounds)


def replayed(ctx, n):
    """Two graphs, replayed in any order between eager calls; every rank replays in the same order."""
    steps, root = [Step(ctx, n) for _ in range(3)], ctx.num_ranks - 1
    for step in steps:
        step.fill(0)
        step.enqueue(root)
    ctx.barrier()
    graphs = capture(*(lambda step=step: step.enqueue(root) for step in steps[:2]))
    order, own, wrong = random.Random(n), random.Random(ctx.cur_rank), count_on(ctx)
    for call in range(150):
        if own.random() < 0.05:
            torch.cuda._sleep(5_000_000)
        which = order.randrange(3)
        steps[which].fill(call)
        graphs[which].replay() if which < 2 else steps[2].enqueue(root)
        wrong += steps[which].wrong(call, root)
        overwrite(ctx, own)
    ctx.barrier()
    assert wrong.item() == 0


@pytest.mark.parametrize(("n", "number"), SIZES)
def test_graphs_replayed_between_other_calls(ranks, n, number):
    ranks.run(run_in_chunks, number, replayed, n)


def forked(ctx, n):
    """A graph of two branches with a step each, a step before and after them, and a barrier."""
    steps, side = [Step(ctx, n) for _ in range(4)], torch.cuda.Stream()
    ctx.device_barrier()
    for step in steps:
        step.fill(0)
        step.enqueue(0)
    ctx.barrier()

    def branches():
        steps[0].enqueue(0)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            steps[1].enqueue(0)
        steps[2].enqueue(0)
        torch.cuda.current_stream().wait_stream(side)
        ctx.device_barrier()
        steps[3].enqueue(0)

    (graph,) = capture(branches)
    wrong = count_on(ctx)
    for call in range(50):
        for number, step in enumerate(steps):
            step.fill(4 * call + number)
        graph.replay()
        for number, step in enumerate(steps):
            wrong += step.wrong(4 * call + number, 0)
    ctx.barrier()
    assert wrong.item() == 0


@pytest.mark.parametrize(("n", "number"), SIZES[1:])
def test_graphs_with_branches(ranks, n, number):
    ranks.run(run_in_chunks, number, forked, n)


def two_streams(ctx, sizes):
    """Calls in flight on two streams at a time, each after work of its own that takes another time on each rank."""
    streams, steps = [torch.cuda.Stream() for _ in sizes], [Step(ctx, n) for n in sizes]
    wrong, generator = [count_on(ctx) for _ in sizes], random.Random(f"streams {ctx.cur_rank}")
    torch.cuda.synchronize()
    for call in range(100):
        for stream, step, count in zip(streams, steps, wrong, strict=True):
            with torch.cuda.stream(stream):
                if call == 0:
                    # First uses, which compile, one stream after the other and with nothing in flight.
                    step.fill(0)
                    step.enqueue(0)
                    ctx.barrier()
                if generator.random() < 0.05:
                    torch.cuda._sleep(generator.randrange(5_000_000))
                step.fill(call)
                step.enqueue(call % ctx.num_ranks)
                count += step.wrong(call, call % ctx.num_ranks)
                overwrite(ctx, generator)
    ctx.barrier()
    assert [count.item() for count in wrong] == [0, 0]


@pytest.mark.parametrize("sizes", [(100, 5000), (4096, 300_000)], ids=str)
@pytest.mark.parametrize("number", [1, 4])
def test_two_streams(ranks, sizes, number):
    ranks.run(run_in_chunks, number, two_streams, sizes)


def asynchronous(ctx):
    """The handle orders the current stream after the stream of the call, and the host waits for neither."""
    side, n = torch.cuda.Stream(), 1 << 20
    own, result = ctx.full((n,), ctx.cur_rank + 1.0), ctx.zeros(n)
    ctx.ccl.all_reduce(result, own)
    with torch.cuda.stream(side):
        ctx.ccl.all_reduce(result, own)
        ctx.device_barrier()
    ctx.barrier()
    with torch.cuda.stream(side):
        result.zero_()
        torch.cuda._sleep(400_000_000)
        begin = time.perf_counter()
        work = ctx.ccl.all_reduce(result, own, async_op=True)
        ctx.device_barrier()
    assert not work.is_completed()
    work.wait()
    copy = result.clone()
    assert time.perf_counter() - begin < 0.1, "the host waited"
    assert copy.unique().tolist() == [ctx.num_ranks * (ctx.num_ranks + 1) / 2]
    assert work.is_completed()


def test_asynchronous_calls(ranks):
    ranks.run(asynchronous)


def first_in_capture(ctx):
    """A context's first collective meets its ranks on the host. It is refused in a graph, which goes on."""
    with iris.iris(1 << 20) as own:
        tensor = own.zeros(100)
        own.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tensor.add_(1)
            with pytest.raises(FirstUseInCaptureError):
                own.ccl.all_reduce(tensor, tensor)
        own.ccl.all_reduce(tensor, tensor)
        # A context may be closed while a graph lives that has its calls.
        (kept,) = capture(lambda: own.ccl.all_reduce(tensor, tensor))
        tensor.fill_(1)
        kept.replay()
        assert tensor.unique().tolist() == [own.num_ranks]
    ctx.barrier()


def test_a_first_use_during_a_capture_says_so(ranks):
    ranks.run(first_in_capture)
