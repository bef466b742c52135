"""The host's side of a context: identity, barriers on host and device, broadcast, two contexts at once, closing."""

import logging
import pickle
import time
from copy import copy as copy_of
from copy import deepcopy

import numpy
import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from covering import EVERYTHING

import iris
from iris.errors import (
    FirstUseInCaptureError,
    HeapClosedError,
    InvalidGroupError,
    NotAStreamError,
    NotPicklableError,
    OutOfStepError,
    RankOutOfRangeError,
)

ON_GPU = torch.cuda.is_available()


@triton.jit
def push_kernel(context_tensor, inbox, value, n, BLOCK: tl.constexpr):
    """Writes ``value`` + position into this rank's row of the inbox of every rank."""
    ctx = iris.DeviceContext.initialize(context_tensor)
    offsets = tl.arange(0, BLOCK)
    for peer in range(ctx.num_ranks):
        ctx.store(inbox + ctx.cur_rank * n + offsets, tl.load(value) + offsets, peer, mask=offsets < n)


@triton.jit
def check_kernel(inbox, wrong, round_number, step, num_ranks, n, BLOCK: tl.constexpr):
    """Counts elements of the inbox that are not what ``push_kernel`` of this round has put."""
    offsets = tl.arange(0, BLOCK)
    for peer in range(num_ranks):
        data = tl.load(inbox + peer * n + offsets, mask=offsets < n)
        expected = peer * 1000003 + tl.load(round_number) * step + offsets
        tl.atomic_add(wrong, tl.sum(((data != expected) & (offsets < n)).to(tl.int32), axis=0))


def run_rounds(ctx, rounds, group=None):
    """Rounds of push, barrier, check, barrier, all enqueued without a host barrier in between."""
    rank, size, n = ctx.get_rank(), ctx.get_num_ranks(), 100
    inbox = ctx.zeros(size * n, dtype=torch.int32)
    wrong = ctx.zeros(1, dtype=torch.int32)
    value = torch.full((1,), rank * 1000003, dtype=torch.int32, device=ctx.device)
    number = torch.zeros(1, dtype=torch.int32, device=ctx.device)
    ctx.barrier()

    def one_round():
        push_kernel[(1,)](ctx.get_device_context(), inbox, value, n, 128)
        ctx.device_barrier(group)
        check_kernel[(1,)](inbox, wrong, number, 1009, size, n, 128)
        ctx.device_barrier(group)
        value.add_(1009)
        number.add_(1)

    for _ in range(rounds):
        one_round()
    return one_round, wrong, value, number


def device_barriers(ctx):
    _, wrong, value, number = run_rounds(ctx, 300 if ON_GPU else 20)
    ctx.barrier()
    assert wrong.item() == 0
    assert number.item() == (300 if ON_GPU else 20)


@pytest.mark.ranks(1, 2, 3, 4, *([8] if EVERYTHING else []))
def test_a_device_barrier_orders_the_work_of_streams(ranks):
    ranks.run(device_barriers)


def skewed(ctx):
    """One rank's stream is late by some milliseconds, another one each time."""
    one_round, wrong, _, _ = run_rounds(ctx, 1)
    for i in range(20):
        if i % ctx.get_num_ranks() == ctx.get_rank():
            if ON_GPU:
                torch.cuda._sleep(2_000_000)
            else:
                time.sleep(0.005)
        one_round()
    ctx.barrier()
    assert wrong.item() == 0


def test_a_device_barrier_waits_for_late_ranks(ranks):
    ranks.run(skewed)


def replay(ctx):
    one_round, wrong, _, number = run_rounds(ctx, 2)
    ctx.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            one_round()
    for _ in range(300):
        graph.replay()
        one_round()  # beside the graph, on flags of its own
    ctx.barrier()
    assert wrong.item() == 0
    assert number.item() == 2 + 300 * 4


@pytest.mark.skipif(not ON_GPU, reason="there are no CUDA graphs without a GPU")
def test_a_device_barrier_in_a_replayed_graph(ranks):
    ranks.run(replay)


def capture_first(ctx):
    with iris.iris(1 << 20) as other:
        with pytest.raises(FirstUseInCaptureError, match="before the capture"):
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                other.device_barrier()
        other.device_barrier()
        other.barrier()


@pytest.mark.skipif(not ON_GPU, reason="there are no CUDA graphs without a GPU")
def test_the_first_device_barrier_cannot_be_captured_and_says_so(ranks):
    ranks.run(capture_first)


def streams(ctx):
    """Rounds on two streams at once, enqueued in another order on odd ranks: flags that they shared would mix them."""
    ctx.device_barrier()
    rounds = []
    for _ in range(2):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            rounds.append((stream, *run_rounds(ctx, 1)))
    order = rounds if ctx.get_rank() % 2 else rounds[::-1]
    for turn in range(200):
        for stream, one_round, _, _, _ in order:
            with torch.cuda.stream(stream):
                if turn % 50 == ctx.get_rank():
                    torch.cuda._sleep(1_000_000)
                one_round()
    ctx.barrier()
    assert [wrong.item() for _, _, wrong, _, _ in rounds] == [0, 0]
    assert [number.item() for *_, number in rounds] == [201, 201]


@pytest.mark.skipif(not ON_GPU, reason="there are no streams without a GPU")
def test_device_barriers_on_several_streams_do_not_meet_each_other(ranks):
    ranks.run(streams)


@triton.jit
def tell_kernel(context_tensor, board, value, first, last):
    """Writes ``value`` into this rank's place on the boards of ranks ``first`` to ``last``."""
    ctx = iris.DeviceContext.initialize(context_tensor)
    for peer in range(first, last):
        ctx.store(board + ctx.cur_rank, value, peer)


def of_group(ctx):
    """Two parts of the world meet by themselves, a different number of times; a member of each comes late."""
    size, rank = ctx.get_num_ranks(), ctx.get_rank()
    parts = [range(size // 2), range(size // 2, size)]
    groups = [dist.new_group(list(part)) for part in parts]
    mine = 0 if rank in parts[0] else 1
    part, group = parts[mine], groups[mine]
    board, seen = ctx.zeros(size, dtype=torch.int32), []
    ctx.barrier()
    for turn in range(1, 11 + 5 * mine):
        if rank == part[turn % len(part)]:
            time.sleep(0.003)
        tell_kernel[(1,)](ctx.get_device_context(), board, 100 * turn + rank, part.start, part.stop)
        if turn % 2:
            ctx.device_barrier(group)
        else:
            ctx.barrier(group=group)
        seen.append(board.clone())
        # Nobody tells the next turn before all have copied this one.
        ctx.device_barrier(group)
    ctx.barrier()
    for turn, copy in enumerate(seen, 1):
        assert copy.tolist() == [100 * turn + peer if peer in part else 0 for peer in range(size)]


@pytest.mark.ranks(2, 3, 4)
def test_barriers_of_groups_order_what_their_members_do(ranks):
    ranks.run(of_group)


def identity(ctx):
    assert ctx.cur_rank == ctx.get_rank() and ctx.num_ranks == ctx.get_num_ranks()
    assert ctx.get_device() == ctx.device and ctx.get_device_id() == ctx.gpu_id
    assert ctx.get_cu_count() >= 1
    bases = ctx.get_heap_bases()
    assert bases.dtype == torch.int64 and bases.tolist() == list(ctx.heap.bases)
    assert ctx.get_device_context().tolist()[: 2 + ctx.num_ranks] == [ctx.cur_rank, ctx.num_ranks, *ctx.heap.bases]
    assert ctx._Iris__on_symmetric_heap(ctx.zeros(3)) and not ctx._Iris__on_symmetric_heap(torch.zeros(3))
    return ctx.cur_rank


@pytest.mark.ranks(1, 2, 3)
def test_identity(ranks):
    assert ranks.run(identity) == list(range(ranks.num_ranks))


VALUES = [
    7,
    -2.5,
    True,
    "text",
    None,
    {"a": [1, (2, 3)]},
    torch.arange(6).view(2, 3),
    torch.tensor(3, dtype=torch.int8),
    torch.zeros(0, 4),
    torch.randn(4, 5, generator=torch.Generator().manual_seed(5)).T.bfloat16(),
    torch.tensor([1 + 2j, 3 - 4j]).conj(),
    torch.tensor([[0.0, 5.0], [6.0, 0.0]]).to_sparse(),
    numpy.arange(5, dtype=numpy.uint16),
]


def send(ctx, index, source, keyword):
    value = VALUES[index]
    given = value if ctx.get_rank() == source else None
    result = ctx.broadcast(given, **{keyword: source})
    if isinstance(value, torch.Tensor):
        torch.testing.assert_close(result, value, rtol=0, atol=0)
    elif isinstance(value, numpy.ndarray):
        numpy.testing.assert_array_equal(result, value)
    else:
        assert result == value and type(result) is type(value)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("index", range(len(VALUES)))
def test_broadcast_hands_on_any_value(ranks, index):
    ranks.run(send, index, index % ranks.num_ranks, "src" if index % 2 else "source_rank")


def send_from_heap(ctx):
    tensor = ctx.full((3,), float(ctx.get_rank()))
    assert ctx.broadcast(tensor, 1 % ctx.num_ranks).tolist() == [1.0 % ctx.num_ranks] * 3
    for wrong in (ctx.num_ranks, "0"):
        with pytest.raises(RankOutOfRangeError, match=f"no rank {wrong!r}"):
            ctx.broadcast(1, wrong)


@pytest.mark.usefixtures("mistaken")
def test_broadcast_of_a_heap_tensor_and_from_a_rank_that_is_not_there(ranks):
    ranks.run(send_from_heap)


def send_in_a_part(ctx):
    """The last two: where there are more, their ranks are not those of the world."""
    members = [ctx.num_ranks - 2, ctx.num_ranks - 1]
    group = dist.new_group(members)
    if ctx.cur_rank in members:
        with iris.iris(1 << 20, process_group=group) as part:
            assert part.num_ranks == 2
            tensor = torch.full((3,), float(part.get_rank()), device=part.device)
            assert part.broadcast(tensor, 1).tolist() == [1.0] * 3


@pytest.mark.ranks(3)
def test_broadcast_among_the_ranks_of_a_context(ranks):
    ranks.run(send_in_a_part)


def two_contexts(ctx):
    with iris.iris(1 << 20) as other:
        mine, theirs = ctx.zeros(10), other.ones(10)
        assert ctx.is_symmetric(mine) and not ctx.is_symmetric(theirs) and other.is_symmetric(theirs)
        other.device_barrier()
        ctx.device_barrier()
        other.barrier()
    for use in (
        other.barrier, other.device_barrier, other.get_heap_bases, lambda: other.zeros(1), other.tracing.enable
    ):  # fmt: skip
        with pytest.raises(HeapClosedError, match="closed"):
            use()
    other.close()
    assert theirs.sum().item() == 10
    ctx.barrier()


def test_two_contexts_live_side_by_side_and_a_closed_one_says_so(ranks):
    ranks.run(two_contexts)


class Sum(torch.nn.Module):
    def __init__(self, ctx):
        super().__init__()
        self.ctx, self.weight = ctx, torch.nn.Parameter(torch.ones(4, device=ctx.device))

    def forward(self):
        self.ctx.ccl.all_reduce(total := torch.empty_like(self.weight), self.weight)
        return total


def copied(ctx):
    module = Sum(ctx)
    for other in (deepcopy(module), copy_of(module)):
        assert other.ctx is ctx and other().tolist() == [ctx.num_ranks] * 4
    with pytest.raises(NotPicklableError, match="Make one in each process.*state_dict"):
        pickle.dumps(module)


def test_a_module_with_a_context_can_be_copied_and_not_pickled(ranks):
    ranks.run(copied)


def collect_messages(ctx, level):
    seen = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    logger = logging.getLogger("iris")
    logger.addHandler(handler)
    iris.set_logger_level(level)
    for name in ("debug", "info", "warning", "error"):
        getattr(ctx, name)(f"{name}: 100% of it")
    iris.set_logger_level(iris.INFO)
    logger.removeHandler(handler)
    return seen


def test_messages_carry_the_rank_and_can_be_silenced(ranks):
    results = ranks.run(collect_messages, iris.WARNING)
    for rank, texts in enumerate(results):
        assert texts == [f"[{rank}/{ranks.num_ranks}] {text}: 100% of it" for text in ("warning", "error")]


def meet_by_flags(ctx):
    with pytest.raises(NotAStreamError, match=r"tensor of shape \[4, 2\].* inside a kernel"):
        ctx.barrier(ctx.zeros(4, 2, dtype=torch.int32))
    ctx.barrier()


def test_the_hosts_barrier_is_not_that_of_kernels(ranks):
    ranks.run(meet_by_flags)


def misuse_groups(ctx):
    for call in (ctx.device_barrier, lambda group: ctx.barrier(group=group)):
        with pytest.raises(InvalidGroupError, match="new_group"):
            call([0, 1])
    with pytest.raises(OutOfStepError, match="broadcast from rank"):
        ctx.broadcast(1, src=ctx.cur_rank)
    ctx.barrier()
    assert f"rank {ctx.cur_rank} of {ctx.num_ranks}" in repr(ctx)


@pytest.mark.usefixtures("mistaken")
@pytest.mark.ranks(2, 3)
def test_groups_and_sources_that_make_no_sense(ranks):
    ranks.run(misuse_groups)
