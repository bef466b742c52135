"""signal, wait, put_signal, fence, barrier: nothing is seen before it arrived, or overwritten before it was read."""

import time

import pytest
import torch
from covering import EVERYTHING, covering

from language import meeting_kernels

ON_GPU = torch.cuda.is_available()
RANKS = (1, 2, 3, 8) if EVERYTHING or ON_GPU else (1, 3)
ROUNDS = 1000 if ON_GPU else 40


def ring(ctx, language, dtype, adds, late_rank):
    rank, size = ctx.get_rank(), ctx.get_num_ranks()
    programs, block, n = 3, 128, 300
    inbox, outbox = ctx.zeros(n, dtype=torch.int32), ctx.zeros(n, dtype=torch.int32)
    results = ctx.zeros(1, dtype=torch.int32)
    arrived, taken = ctx.zeros(programs, dtype=dtype), ctx.zeros(programs, dtype=dtype)
    kernel = getattr(meeting_kernels, f"{language}_ring")
    ctx.barrier()
    # Several launches in a row, and nobody waits on the host in between; one rank comes late each time.
    for launch in range(4):
        if rank == late_rank % size:
            time.sleep(0.01)
        first = launch * (ROUNDS // 4)
        kernel[(programs,)](
            ctx.get_device_context(), inbox, outbox, results, arrived, taken, first, ROUNDS // 4, n, adds, block
        )
    ctx.barrier()
    assert results.item() == 0
    assert arrived.tolist() == taken.tolist() == [ROUNDS] * programs


@pytest.mark.ranks(*RANKS)
@pytest.mark.parametrize(
    ("language", "dtype", "adds", "late_rank"),
    covering(["triton", "gluon"], [torch.int32, torch.int64], [False, True], [0, 1]),
)
def test_put_signal_and_wait_pass_changing_data_round_a_ring(ranks, language, dtype, adds, late_rank):
    ranks.run(ring, language, dtype, adds, late_rank)


def exchange(ctx, language, dtype, use_epoch, start):
    rank, size = ctx.get_rank(), ctx.get_num_ranks()
    programs, n, rounds = 2, 50, ROUNDS // 8
    slots = ctx.zeros(programs * size * n, dtype=torch.int32)
    results = ctx.zeros(1, dtype=torch.int32)
    flags = ctx.full((programs, size), start, dtype=dtype)
    kernel = getattr(meeting_kernels, f"{language}_exchange")
    ctx.barrier()
    for launch in range(3):
        if rank == launch % size:
            time.sleep(0.005)
        epoch = start + launch * 2 * rounds
        if dtype == torch.int32:
            epoch = (epoch + (1 << 31)) % (1 << 32) - (1 << 31)
        kernel[(programs,)](ctx.get_device_context(), slots, results, flags, epoch, rounds, n, use_epoch, 64)
    ctx.barrier()
    assert results.item() == 0
    # Nobody is further than the others, and the count goes on through the end of its type.
    reached = (start + 6 * rounds + (1 << 31)) % (1 << 32) - (1 << 31) if dtype == torch.int32 else start + 6 * rounds
    assert flags.tolist() == [[reached] * size] * programs


@pytest.mark.ranks(*RANKS)
@pytest.mark.parametrize(
    ("language", "dtype", "use_epoch"), covering(["triton", "gluon"], [torch.int32, torch.int64], [False, True])
)
def test_a_barrier_orders_what_came_before_it(ranks, language, dtype, use_epoch):
    ranks.run(exchange, language, dtype, use_epoch, 0)


@pytest.mark.parametrize(("language", "use_epoch"), [("triton", False), ("gluon", True)])
def test_a_barrier_counts_on_when_its_epoch_wraps(ranks, language, use_epoch):
    ranks.run(exchange, language, torch.int32, use_epoch, (1 << 31) - 9)


def fenced(ctx):
    data, flag = ctx.zeros(200, dtype=torch.int32), ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    meeting_kernels.triton_fenced[(1,)](ctx.get_device_context(), data, flag, 100, 128)
    ctx.barrier()
    if ctx.get_rank() == 1:
        assert data.tolist() == 2 * list(range(17, 117))


def test_a_fence_orders_stores_before_a_relaxed_flag(ranks):
    ranks.run(fenced)


def compare(ctx, language, cmp, dtype, held, value):
    flag, seen = ctx.full((1,), held, dtype=dtype), ctx.zeros(1, dtype=dtype)
    ctx.barrier()
    getattr(meeting_kernels, f"{language}_compare")[(1,)](ctx.get_device_context(), flag, value, seen, cmp)
    ctx.barrier()
    assert seen.item() == held


COMPARISONS = [
    ("eq", 5, 5),
    ("ne", 5, 6),
    ("gt", 6, 5),
    ("ge", 5, 5),
    ("ge", 6, 5),
    ("lt", 4, 5),
    ("le", 5, 5),
    ("le", 4, 5),
    ("reached", 5, 5),
    ("reached", 6, 5),
    ("reached", 3 - (1 << 63), (1 << 63) - 2),  # has overflowed
]


@pytest.mark.ranks(1)
@pytest.mark.parametrize(("cmp", "held", "value"), COMPARISONS)
@pytest.mark.parametrize("language", ["triton", "gluon"])
def test_a_wait_that_is_met_returns_the_flag(ranks, language, cmp, held, value):
    ranks.run(compare, language, cmp, torch.int64, held, value)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("cmp, past", [("ge", 0), ("ge", 1), ("reached", 0), ("reached", 1), ("reached", 1 << 30)])
@pytest.mark.parametrize("dtype, value", [
    (torch.int32, 5), (torch.uint32, 5), (torch.uint32, (1 << 32) - 1 - (1 << 30)), (torch.uint64, 5),
])  # fmt: skip
@pytest.mark.parametrize("language", ["triton", "gluon"])
def test_a_wait_is_over_where_the_count_is_past_the_value(ranks, language, dtype, value, cmp, past):
    ranks.run(compare, language, cmp, dtype, value + past, value)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint32, torch.uint64])
@pytest.mark.parametrize("language", ["triton", "gluon"])
def test_a_count_that_has_overflowed_is_past_the_value(ranks, language, dtype):
    info = torch.iinfo(dtype)
    ranks.run(compare, language, "reached", dtype, info.min + 3, info.max - 1)


def identity(ctx, language):
    rank, size = ctx.get_rank(), ctx.get_num_ranks()
    out = ctx.zeros(size + 2, dtype=torch.int32)
    getattr(meeting_kernels, f"{language}_identity")[(1,)](ctx.get_device_context(), out, rank, size)
    ctx.barrier()
    assert out.tolist() == [rank] * size + [rank, size]


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("language", ["triton", "gluon"])
def test_a_context_knows_rank_and_size(ranks, language):
    ranks.run(identity, language)
