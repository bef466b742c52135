"""Ranks on several hosts: who is where, what kernels reach, barriers, and what is refused."""

import os
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from patterns import assert_same_bits, pattern
from rank_pool import HOSTS, Hosts, needs_gloo
from torch.distributed import distributed_c10d

import iris
from iris import info
from iris.errors import (
    AsymmetricHeapError,
    GroupAbortedError,
    HeapOutOfMemoryError,
    InvalidGroupError,
    IrisTimeoutError,
    RankOutOfRangeError,
    RemoteRankError,
    SeveralHostsError,
)
from iris.ops import FusedConfig


@triton.jit
def find_local_kernel(context_tensor, found):
    ctx = iris.DeviceContext.initialize(context_tensor)
    for rank in range(ctx.num_ranks):
        tl.store(found + rank, ctx.is_local(rank).to(tl.int32))


def say_who_is_where(ctx, hosts):
    local_ranks = hosts.ranks_of(hosts.host_of(ctx.cur_rank))
    assert (ctx.host, ctx.num_hosts) == (hosts.host_of(ctx.cur_rank), hosts.hosts)
    assert (ctx.local_rank, ctx.num_local_ranks) == (local_ranks.index(ctx.cur_rank), hosts.ranks_each)
    assert ctx.local_ranks == tuple(local_ranks)
    here = [rank in local_ranks for rank in range(ctx.num_ranks)]
    assert [ctx.is_local(rank) for rank in range(ctx.num_ranks)] == here
    with pytest.raises(RankOutOfRangeError):
        ctx.is_local(ctx.num_ranks)
    bases = ctx.get_heap_bases()
    # By its type kernels on GPUs are compiled with guards.
    assert bases.dtype == (torch.uint64 if ctx.device.type == "cuda" else torch.int64)
    assert [base != 0 for base in bases.tolist()] == here
    found = ctx.zeros(ctx.num_ranks, dtype=torch.int32)
    find_local_kernel[(1,)](ctx.get_device_context(), found)
    assert found.bool().tolist() == here


@pytest.mark.ranks(*HOSTS)
def test_each_rank_knows_its_host(mistaken, ranks):
    ranks.run(say_who_is_where, ranks.hosts)


def inform(ctx, hosts):
    report = info.find_hosts(ctx)
    each = [{"name": f"host{host}", "ranks": tuple(hosts.ranks_of(host))} for host in range(hosts.hosts)]
    assert report["hosts"] == each
    assert report["linked by"].startswith("NCCL " if ctx.device.type == "cuda" else "Gloo")


@pytest.mark.ranks(Hosts(2, 2, dealt=True))
def test_iris_info_names_the_hosts(ranks):
    ranks.run(inform, ranks.hosts)


def say_who_is_here(ctx):
    assert (ctx.host, ctx.num_hosts, ctx.local_rank, ctx.num_local_ranks) == (0, 1, ctx.cur_rank, ctx.num_ranks)
    assert ctx.local_ranks == tuple(range(ctx.num_ranks)) and ctx.is_local(ctx.num_ranks - 1)
    found = ctx.zeros(ctx.num_ranks, dtype=torch.int32)
    find_local_kernel[(1,)](ctx.get_device_context(), found)
    assert found.tolist() == [1] * ctx.num_ranks


@pytest.mark.ranks(1, 3)
def test_one_host_has_all_ranks(ranks):
    ranks.run(say_who_is_here)


def claim_another_host(ctx):
    """Rank 1 says that it is on the other host: all are told, and go on."""
    host = "host1" if ctx.cur_rank == 1 else os.environ["IRIS_HOST"]
    text = r"these differ: 1 on host0, 3 on host1 \(rank 0 on host0; ranks 1, 2 and 3 on host1\)"
    with mock.patch.dict(os.environ, IRIS_HOST=host), pytest.raises(InvalidGroupError, match=text):
        iris.iris(1 << 16)
    ctx.barrier()


@pytest.mark.ranks(Hosts(2, 2), exactly=True)
def test_hosts_with_other_numbers_of_ranks_are_refused(ranks):
    ranks.run(claim_another_host)


@triton.jit
def push_kernel(context_tensor, inbox, value):
    """Writes ``value`` into this rank's place of the inbox of each rank of its host."""
    ctx = iris.DeviceContext.initialize(context_tensor)
    for rank in range(ctx.num_ranks):
        if ctx.is_local(rank):
            ctx.store(inbox + ctx.cur_rank, tl.load(value), rank)


def push_in_rounds(ctx, late):
    """By the barriers of the host and of streams; one rank is late, another one each time."""
    inbox, value = ctx.full((ctx.num_ranks,), -1, dtype=torch.int64), ctx.zeros(1, dtype=torch.int64)
    ctx.barrier()  # nobody stores to an inbox that is not filled yet
    for turn in range(2 * ctx.num_ranks):
        if late and turn % ctx.num_ranks == ctx.cur_rank:
            time.sleep(0.02)
        barrier = ctx.device_barrier if turn % 3 else ctx.barrier
        value.fill_(1000 * turn + ctx.cur_rank)
        push_kernel[(1,)](ctx.get_device_context(), inbox, value)
        barrier()
        expected = [1000 * turn + rank if ctx.is_local(rank) else -1 for rank in range(ctx.num_ranks)]
        assert inbox.tolist() == expected
        barrier()


@pytest.mark.ranks(*HOSTS)
@pytest.mark.parametrize("late", [False, True])
def test_barriers_order_what_the_ranks_of_a_host_store(ranks, late):
    ranks.run(push_in_rounds, late)


def note_when(ctx, device):
    """When this rank came to a barrier, and when it left."""

    def barrier():
        ctx.device_barrier() if device else ctx.barrier()
        if ctx.device.type == "cuda":
            torch.cuda.synchronize()

    times = []
    for turn in range(ctx.num_ranks):
        barrier()
        if turn == ctx.cur_rank:
            time.sleep(0.05)
        came = time.monotonic()
        barrier()
        times.append((came, time.monotonic()))
    return times


@pytest.mark.ranks(Hosts(2, 2, dealt=True), Hosts(4, 1))
@pytest.mark.parametrize("device", [False, True])
def test_nobody_leaves_a_barrier_before_all_hosts_have_come(ranks, device):
    for turn in zip(*ranks.run(note_when, device), strict=True):
        assert max(came for came, _ in turn) <= min(left for _, left in turn)


def broadcast_in_turns(ctx):
    for src in range(ctx.num_ranks):
        sent = pattern((3, 5), torch.bfloat16, src)
        assert_same_bits(ctx.broadcast(sent if ctx.cur_rank == src else None, src), sent)
        assert ctx.broadcast({"from": ctx.cur_rank}, src) == {"from": src}


@pytest.mark.ranks(Hosts(2, 2), Hosts(3, 2))
def test_objects_and_tensors_reach_all_hosts(ranks):
    ranks.run(broadcast_in_turns)


def allocate_alike(ctx):
    """The same offsets everywhere; memory comes back when the ranks of all hosts have let go of it."""
    before = ctx.heap.stats().reserved
    tensors = [ctx.full((1000 + number,), ctx.cur_rank, dtype=torch.int32) for number in range(4)]
    offsets = [ctx.heap.offset(tensor) for tensor in tensors]
    assert ctx.broadcast(offsets) == offsets
    ctx.barrier()
    for rank in ctx.local_ranks:
        assert ctx.peer(tensors[0], rank).tolist() == [rank] * 1000
    ctx.barrier()
    kept = tensors if ctx.cur_rank == ctx.num_ranks - 1 else None
    del tensors
    ctx.barrier()
    assert ctx.heap.stats().reserved > before  # one rank, of another host than most, still holds on to them
    del kept
    ctx.barrier()
    assert ctx.heap.stats().reserved == before
    with iris.iris(1 << 16) as other:
        for _ in range(20):  # more than fits at once: the ranks of all hosts meet in the allocation
            other.empty(3 << 13, dtype=torch.uint8)
        held = other.empty(3 << 14, dtype=torch.uint8)
        with pytest.raises(HeapOutOfMemoryError):
            other.empty(held.shape, dtype=torch.uint8)


@pytest.mark.ranks(*HOSTS)
def test_the_heap_is_symmetric_over_hosts(mistaken, ranks):
    ranks.run(allocate_alike)


def allocate_differently(ctx):
    with pytest.raises(AsymmetricHeapError, match=f"ranks? {ctx.num_ranks - 1} made"):
        with iris.iris(1 << 20) as other:
            kept = [other.zeros(4)] if ctx.cur_rank == ctx.num_ranks - 1 else []
            other.barrier()
            del kept


@pytest.mark.ranks(Hosts(2, 2))
def test_other_allocations_on_another_host_are_told(ranks, mistaken):
    ranks.run(allocate_differently)


@triton.jit
def reach_kernel(context_tensor, heap_bases, data, flags, out, peer, HOW: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context_tensor)
    rank = ctx.cur_rank
    if HOW == "load":
        tl.store(out, ctx.load(data, peer))
    elif HOW == "store":
        ctx.store(data, 1, peer)
    elif HOW == "get":
        ctx.get(data, out, peer)
    elif HOW == "put":
        ctx.put(out, data, peer)
    elif HOW == "copy":
        ctx.copy(data, data, rank, peer)
    elif HOW == "atomic_add":
        ctx.atomic_add(data, 1, peer)
    elif HOW == "signal":
        ctx.signal(flags, 1, peer)
    elif HOW == "translate":
        tl.store(ctx.translate(data, peer), 1)
    elif HOW == "function":
        iris.store(data, 1, rank, peer, heap_bases)
    elif HOW == "block":
        lanes = tl.arange(0, 2)
        ctx.store(data + lanes, lanes, tl.where(lanes == 0, rank, peer))
    elif HOW == "masked":
        lanes = tl.arange(0, 2)
        ctx.store(data + lanes, lanes + 5, tl.where(lanes == 0, rank, peer), mask=lanes == 0)
    else:
        ctx.barrier(flags)


HOW = "load store get put copy atomic_add signal translate function block barrier".split()


def reach_for(ctx, hows):
    """In the simulator the kernel itself raises the error, on a GPU the next barrier does, and nothing is written."""
    remote, on_gpu = next(rank for rank in range(ctx.num_ranks) if not ctx.is_local(rank)), ctx.device.type == "cuda"
    text = r"Rank \d+ is on another host, host\d.*ctx\.ccl\.all_gather"
    if on_gpu:
        text = text.replace(".*", f".* as program 0 of a kernel of rank {ctx.cur_rank} tried.*")
    for how in [*hows, "masked"]:
        data, flags = ctx.zeros(2, dtype=torch.int32), ctx.zeros(ctx.num_ranks, dtype=torch.int32)
        out = torch.zeros(1, dtype=torch.int32, device=ctx.device)
        args = ctx.get_device_context(), ctx.get_heap_bases(), data, flags, out, remote, how
        if how == "masked":
            reach_kernel[(1,)](*args)
            assert data.tolist() == [5, 0]
            continue
        with pytest.raises(RemoteRankError, match=text):
            reach_kernel[(1,)](*args)
            ctx.barrier()
        if on_gpu and how != "translate":
            assert not data.any() and not flags.any() and (how == "load" or not out.any()), how
    with pytest.raises(RemoteRankError, match=f"Rank {remote} is on another host, host"):
        ctx.peer(data, remote)
    with pytest.raises(RankOutOfRangeError):
        ctx.peer(data, ctx.num_ranks)
    ctx.barrier()


@pytest.mark.ranks(Hosts(2, 2), Hosts(2, 2, dealt=True))
def test_a_rank_of_another_host_is_not_reached_by_kernels(ranks, mistaken):
    ranks.run(reach_for, HOW)


def stay_away(ctx, call):
    """The ranks of the last host do not come; the others wait no longer than the process group's time limit."""
    store = distributed_c10d._get_process_group_store(dist.group.WORLD)
    before = store.timeout
    store.set_timeout(timedelta(seconds=2))
    try:
        other = iris.iris(1 << 16)
    finally:
        store.set_timeout(before)
    late, x, start = ctx.host == ctx.num_hosts - 1, torch.ones(4), time.monotonic()
    if not late:
        # Who finds it first breaks the group, and may be faster than this rank.
        text = r"Rank \d waited 2 s in .* for ranks? .* is on host\d.*The limit is the time-out of the process group"
        with pytest.raises((IrisTimeoutError, GroupAbortedError), match=text):
            other.ccl.all_reduce(x, x) if call == "all_reduce" else other.device_barrier()
        assert 1.5 < time.monotonic() - start < 20
    ctx.barrier()
    with pytest.raises(GroupAbortedError, match="IrisTimeoutError"):
        other.barrier()
    ctx.barrier()
    other.close()


@needs_gloo
@pytest.mark.ranks(Hosts(2, 2), Hosts(4, 1))
@pytest.mark.parametrize("call", ["all_reduce", "device_barrier"])
def test_a_host_that_does_not_come_is_named(ranks, call, mistaken):
    ranks.run(stay_away, call)


def ask_for_what_is_not_there(ctx):
    """At once, on the rank that asks; and everybody goes on."""
    x = torch.ones(ctx.num_ranks, device=ctx.device)
    matrix = torch.ones(ctx.num_ranks, ctx.num_ranks, device=ctx.device)
    product = torch.empty_like(matrix)
    calls = {
        "preamble": lambda: ctx.ccl.all_reduce_preamble(x, x),
        "config": lambda: ctx.ccl.all_reduce(x, x, config=iris.ccl.Config(comm_sms=1)),
        "operation": lambda: ctx.ops.matmul_all_reduce(product, matrix, matrix, config=FusedConfig()),
        "preamble of one": lambda: ctx.ops.matmul_all_reduce_preamble(product, matrix, matrix),
    }
    for name, call in calls.items():
        if ctx.cur_rank == 1:
            with pytest.raises(SeveralHostsError, match="not yet over several. [A-Z]"):
                call()
                raise AssertionError(name)
    ctx.barrier()


@pytest.mark.ranks(Hosts(2, 2))
def test_what_is_not_built_over_hosts_says_so(ranks):
    ranks.run(ask_for_what_is_not_there)
