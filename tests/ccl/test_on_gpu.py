"""What only GPUs have: streams and graphs, kernels that are late, more than 4 GiB, and what a call costs the host."""

import random
import statistics
import time

import pytest
import torch
from patterns import assert_same_bits, pattern

from iris.ccl import Config

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there are no streams or graphs without a GPU")

# Elements of bfloat16 of a rank's piece: in each way that data take.
SIZES = [3, 4096, 60_000, 1_500_000]
HOST_COST_US = 8


class Step:
    """Every collective once, on tensors that stay, and what must come out of it."""

    def __init__(self, ctx, n, heap=True):
        self.ctx, self.size, self.rank = ctx, ctx.num_ranks, ctx.cur_rank
        make = ctx.empty if heap else lambda *shape, dtype: torch.empty(*shape, dtype=dtype, device=ctx.device)
        self.own = make(n, dtype=torch.bfloat16)
        self.whole = make(n * self.size, dtype=torch.bfloat16)
        self.gathered, self.exchanged = torch.empty_like(self.whole), make(n * self.size, dtype=torch.bfloat16)
        self.total, self.part = make(n, dtype=torch.bfloat16), make(n, dtype=torch.bfloat16)
        self.broadcasted = make(n, dtype=torch.bfloat16)

    def fill(self, call):
        """Whole numbers, so that sums are exact; another one for each rank, call and place."""
        ranks = torch.arange(self.size, device=self.ctx.device)
        self.own.copy_((torch.arange(self.own.numel(), device=self.ctx.device) + call + 5 * self.rank) % 13)
        self.whole.view(self.size, -1).copy_((self.own + ranks[:, None]) % 13)

    def enqueue(self, root, config=None):
        ccl = self.ctx.ccl
        ccl.all_gather(self.gathered, self.own, config=config)
        ccl.all_reduce(self.total, self.own, config=config)
        ccl.reduce_scatter(self.part, self.whole, config=config)
        ccl.all_to_all(self.exchanged, self.whole, config=config)
        self.broadcasted.copy_(self.own)
        ccl.broadcast(self.broadcasted, root, config=config)

    def wrong(self, call, root):
        """How many elements are not what they should be, on the device; the host does not wait."""
        i = torch.arange(self.own.numel(), device=self.ctx.device)
        ranks = torch.arange(self.size, device=self.ctx.device)[:, None]
        everyone = (i + call + 5 * ranks) % 13
        mine = (everyone + self.rank) % 13
        return sum(
            (actual.view(expected.shape) != expected).sum()
            for actual, expected in [
                (self.gathered, everyone), (self.total, everyone.sum(0)), (self.part, mine.sum(0)),
                (self.exchanged, mine), (self.broadcasted, everyone[root]),
            ]
        )  # fmt: skip


def replayed(ctx, n, heap):
    step = Step(ctx, n, heap)
    step.fill(0)
    step.enqueue(0)
    ctx.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.enqueue(1 % ctx.num_ranks)
    ctx.barrier()
    wrong = torch.zeros((), dtype=torch.int64, device=ctx.device)
    generator = random.Random(ctx.cur_rank)
    for call in range(200):
        if generator.random() < 0.1:
            torch.cuda._sleep(2_000_000)
        step.fill(call)
        if call % 3:
            graph.replay()
        else:
            step.enqueue(1 % ctx.num_ranks)
        wrong += step.wrong(call, 1 % ctx.num_ranks)
    ctx.barrier()
    assert wrong.item() == 0


@pytest.mark.parametrize("heap", [True, False], ids=["heap", "elsewhere"])
@pytest.mark.parametrize("n", SIZES)
def test_graphs_replayed_between_other_calls(ranks, n, heap):
    if n < 1_500_000 or heap:
        ranks.run(replayed, n, heap)


def forked(ctx, n):
    """A graph of two branches with a step each, and a step before and after them."""
    steps, side = [Step(ctx, n) for _ in range(4)], torch.cuda.Stream()
    for step in steps:
        step.fill(0)
        step.enqueue(0)
    ctx.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        steps[0].enqueue(0)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            steps[1].enqueue(0)
        steps[2].enqueue(0)
        torch.cuda.current_stream().wait_stream(side)
        steps[3].enqueue(0)
    wrong = torch.zeros((), dtype=torch.int64, device=ctx.device)
    for call in range(100):
        for i, step in enumerate(steps):
            step.fill(4 * call + i)
        graph.replay()
        for i, step in enumerate(steps):
            wrong += step.wrong(4 * call + i, 0)
    ctx.barrier()
    assert wrong.item() == 0


@pytest.mark.parametrize("n", [4096, 300_000])
def test_graphs_with_branches(ranks, n):
    ranks.run(forked, n)


def skewed(ctx, n, rounds):
    step, generator = Step(ctx, n), random.Random(f"skew {ctx.cur_rank}")
    wrong = torch.zeros((), dtype=torch.int64, device=ctx.device)
    for call in range(rounds):
        if generator.random() < 0.02:
            torch.cuda._sleep(generator.randrange(10_000_000))
        step.fill(call)
        step.enqueue(call % ctx.num_ranks)
        wrong += step.wrong(call, call % ctx.num_ranks)
    ctx.barrier()
    assert wrong.item() == 0


@pytest.mark.parametrize(("n", "rounds"), [(3, 2000), (4096, 1000), (60_000, 500)])
def test_a_rank_that_is_milliseconds_late(ranks, n, rounds):
    ranks.run(skewed, n, rounds)


def hurried(ctx, n, rounds, warps):
    """Programs of more warps than they need, which all wait for the same words and counts."""
    step, config = Step(ctx, n), Config(comm_sms=16, num_warps=warps)
    wrong = torch.zeros((), dtype=torch.int64, device=ctx.device)
    for call in range(rounds):
        step.fill(call)
        step.enqueue(call % ctx.num_ranks, config)
        wrong += step.wrong(call, call % ctx.num_ranks)
    ctx.barrier()
    assert wrong.item() == 0


@pytest.mark.parametrize("warps", [4, 16, 32])
@pytest.mark.parametrize(("n", "rounds"), [(4096, 1000), (60_000, 1000)])
def test_programs_of_many_warps(ranks, n, rounds, warps):
    ranks.run(hurried, n, rounds, warps)


def two_streams(ctx, sizes):
    """Calls in flight on two streams at a time, which finish in whatever order."""
    streams = [torch.cuda.Stream() for _ in sizes]
    steps = [Step(ctx, n) for n in sizes]
    wrong = [torch.zeros((), dtype=torch.int64, device=ctx.device) for _ in sizes]
    torch.cuda.synchronize()
    for call in range(100):
        for stream, step, count in zip(streams, steps, wrong, strict=True):
            with torch.cuda.stream(stream):
                if call == 0:
                    # First uses, which compile, one stream after the other and with nothing in flight.
                    step.fill(0)
                    step.enqueue(0)
                    ctx.barrier()
                step.fill(call)
                step.enqueue(call % ctx.num_ranks)
                count += step.wrong(call, call % ctx.num_ranks)
    ctx.barrier()
    assert [count.item() for count in wrong] == [0, 0]


@pytest.mark.parametrize("sizes", [(100, 5000), (4096, 4096), (60_000, 1_000_000)], ids=str)
def test_two_streams(ranks, sizes):
    ranks.run(two_streams, sizes)


def crossing(ctx, n):
    """Every second rank has begun the sums of one stream when it comes to the other's; the others the other way round.

    There are several, of which the next ones may take places before their turn.
    """
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    inputs = [torch.full((n,), float(1 + k), dtype=torch.bfloat16, device=ctx.device) for k in range(2)]
    outputs = [torch.zeros_like(x) for x in inputs]

    def sums(k):
        with torch.cuda.stream(streams[k]):
            for _ in range(4):
                ctx.ccl.all_reduce(outputs[k], inputs[k])

    for round in range(8):
        torch.cuda.synchronize()
        ctx.barrier()
        first = (ctx.cur_rank + round) % 2 if round else 0
        sums(first)
        # They are in their places. First uses come in the same order on all ranks.
        time.sleep(0.02)
        sums(1 - first)
        end = time.monotonic() + 10
        while time.monotonic() < end and not all(stream.query() for stream in streams):
            time.sleep(0.01)
        assert all(stream.query() for stream in streams), "each waits for the other"
    for k in range(2):
        assert (outputs[k] == (1 + k) * ctx.num_ranks).all()


@pytest.mark.parametrize("n", [1 << 16, 1 << 18, 1 << 21])
def test_sums_of_two_streams_leave_room_for_each_other(ranks, n):
    ranks.run(crossing, n)


def around(ctx, n):
    """Each rank sends to the next on one stream and receives from the one before on another, more than queues hold."""
    after, before = (ctx.cur_rank + 1) % ctx.num_ranks, (ctx.cur_rank - 1) % ctx.num_ranks
    out, into = torch.cuda.Stream(), torch.cuda.Stream()
    given, result = torch.empty(n, device=ctx.device), torch.empty(n, device=ctx.device)
    wrong = torch.zeros((), dtype=torch.int64, device=ctx.device)
    positions = torch.arange(n, device=ctx.device, dtype=torch.float32)
    for call in range(40):
        # Lengths of one alignment, in an order that no kernel is there for yet.
        count = n if call % 3 else 4096
        torch.cuda.synchronize()
        given.copy_(positions + (1000 * call + ctx.cur_rank))
        torch.cuda.synchronize()
        calls = [(out, ctx.ccl.send, given[:count], after), (into, ctx.ccl.recv, result[:count], before)]
        for stream, message, tensor, peer in calls[::-1] if call % 2 else calls:
            with torch.cuda.stream(stream):
                message(tensor, peer)
        torch.cuda.synchronize()
        wrong += (result[:count] != positions[:count] + (1000 * call + before)).sum()
    assert wrong.item() == 0


def test_messages_around_all_ranks_at_once(ranks):
    ranks.run(around, 8 << 20)


def asynchronous(ctx):
    """The handle orders the current stream after the stream of the call, and the host waits for neither."""
    side, n = torch.cuda.Stream(), 1 << 20
    own, result = ctx.full((n,), ctx.cur_rank + 1.0), ctx.zeros(n)
    ctx.ccl.all_reduce(result, own)
    with torch.cuda.stream(side):
        ctx.ccl.all_reduce(result, own)
    ctx.barrier()
    with torch.cuda.stream(side):
        result.zero_()
        torch.cuda._sleep(200_000_000)
        begin = time.perf_counter()
        work = ctx.ccl.all_reduce(result, own, async_op=True)
    assert not work.is_completed()
    work.wait()
    copy = result.clone()
    assert time.perf_counter() - begin < 0.05, "the host waited"
    assert copy.unique().tolist() == [ctx.num_ranks * (ctx.num_ranks + 1) / 2]
    assert work.is_completed()


def test_asynchronous_calls(ranks):
    ranks.run(asynchronous)


def large(ctx, name):
    """More than 4 GiB of bytes: every place is reached by what has the right rank and position."""
    n = (1 << 32) // ctx.num_ranks + 4096 if name == "all_gather" else (1 << 32) + 4096 * ctx.num_ranks
    tail = pattern((4096,), torch.uint8, ctx.cur_rank)
    own = torch.zeros(n, dtype=torch.uint8, device=ctx.device)
    if name == "all_gather":
        own[-4096:] = tail.to(ctx.device)
        result = torch.empty(n * ctx.num_ranks, dtype=torch.uint8, device=ctx.device)
        ctx.ccl.all_gather(result, own)
        for rank in range(ctx.num_ranks):
            assert_same_bits(result[(rank + 1) * n - 4096 : (rank + 1) * n], pattern((4096,), torch.uint8, rank))
            assert not result[rank * n : (rank + 1) * n - 4096].any()
    elif name == "broadcast":
        if ctx.cur_rank == 0:
            own[-4096:] = tail.to(ctx.device)
        else:
            own.fill_(7)
        ctx.ccl.broadcast(own, 0)
        assert_same_bits(own[-4096:], pattern((4096,), torch.uint8, 0))
        assert not own[:-4096].any()
    elif name == "all_reduce":
        own[-4096:] = ctx.cur_rank + 1
        ctx.ccl.all_reduce(own, own)
        assert (own[-4096:] == ctx.num_ranks * (ctx.num_ranks + 1) // 2).all()
        assert not own[:-4096].any()
    else:
        part = n // ctx.num_ranks
        own[-part:] = ctx.cur_rank + 1
        result = torch.empty(part, dtype=torch.uint8, device=ctx.device)
        ctx.ccl.reduce_scatter(result, own)
        last = ctx.cur_rank == ctx.num_ranks - 1
        assert (result == (ctx.num_ranks * (ctx.num_ranks + 1) // 2 if last else 0)).all()


@pytest.mark.parametrize("name", ["all_gather", "broadcast", "all_reduce", "reduce_scatter"])
def test_more_than_4_gib(ranks, name):
    ranks.run(large, name)


def host_cost(ctx, name):
    """Microseconds of the host's time, after a kernel that keeps the stream busy: of the collective, and of the least
    that torch enqueues. The quietest of five medians of 100 calls: a host has other work too.
    """
    own, whole = ctx.ones(1024), ctx.ones(1024 * ctx.num_ranks)
    arguments = {
        "all_gather": (whole, own), "all_reduce": (own, own), "reduce_scatter": (ctx.empty(1024), whole),
        "all_to_all": (torch.empty_like(whole), whole), "broadcast": (own, 0),
    }[name]  # fmt: skip
    costs = []
    for call, args in ((getattr(ctx.ccl, name), arguments), (own.mul_, (1,))):
        medians = []
        for _ in range(5):
            spent = []
            ctx.barrier()
            torch.cuda._sleep(20_000_000)
            for _ in range(100):
                begin = time.perf_counter()
                call(*args)
                spent.append(time.perf_counter() - begin)
            medians.append(statistics.median(spent) * 1e6)
        ctx.barrier()
        costs.append(min(medians))
    return costs


@pytest.mark.parametrize("name", ["all_gather", "all_reduce", "reduce_scatter", "all_to_all", "broadcast"])
def test_what_a_call_costs_the_host(ranks, name):
    """8 us, or on a slower host half as much again as torch takes for its smallest kernel."""
    costs = ranks.run(host_cost, name)
    print(costs)
    assert all(mine <= max(HOST_COST_US, 1.5 * torchs) for mine, torchs in costs), costs


def first_in_capture(ctx):
    import iris
    from iris.errors import FirstUseInCaptureError

    with iris.iris(1 << 20) as own:
        tensor = own.zeros(100)
        own.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tensor.add_(1)
            with pytest.raises(FirstUseInCaptureError, match="all_reduce"):
                own.ccl.all_reduce(tensor, tensor)
        own.ccl.all_reduce(tensor, tensor)
        own.barrier()


def test_a_first_use_during_a_capture_says_so(ranks):
    ranks.run(first_in_capture)
