"""Messages between ranks of several hosts, whichever local ranks they have."""

import time

import pytest
import torch
import torch.distributed as dist
from covering import thorough
from patterns import assert_same_bits, pattern
from rank_pool import FEWER_HOSTS, HOSTS, Hosts, needs_gloo

import iris
import iris.distributed  # noqa: F401 (registers the backend)
from ccl.calls import LAYOUTS, Case, sample
from ccl.test_over_hosts import move, move_among
from ccl.test_process_group import make_group
from iris.errors import (
    FirstUseInCaptureError,
    GroupAbortedError,
    InvalidCollectiveError,
    MismatchedCollectiveError,
    PeerLostError,
)

SHAPES = [(0,), (1,), (5, 3), (70_001,)]


def cases(seed, number):
    kinds = sample(number, seed, SHAPES, [torch.uint8, torch.bfloat16, torch.float64, torch.bool], LAYOUTS)
    return [Case("send", shape, dtype, layout=layout) for shape, dtype, layout in kinds]


@pytest.mark.ranks(*HOSTS)
def test_a_message_goes_once_round_all_ranks(ranks):
    ranks.run(move, cases("messages", 8))


def go_round_a_group(ctx, members, messages):
    group, memory = dist.new_group(members), ctx.empty(4 << 20, dtype=torch.uint8)
    if ctx.cur_rank in members:
        ctx.device_barrier(group)
        move_among(ctx, messages, memory, members, group)
    ctx.barrier()


@pytest.mark.ranks(Hosts(2, 2, dealt=True), Hosts(2, 3))
def test_a_message_goes_round_a_group(ranks):
    hosts = ranks.hosts
    members = sorted(rank for host in range(2) for rank in hosts.ranks_of(host)[-2:])
    ranks.run(go_round_a_group, members, cases("a group", 4))


def value(n, source, target, turn, device):
    return pattern((n,), torch.float32, source, 100 * turn + target).to(device)


def exchange_with_all(ctx, fresh):
    """Every rank with every other, at once: by turns all receive first, or send first, or each as it likes."""
    group = make_group(ctx)
    if not fresh:
        dist.barrier(group)
    others = [rank for rank in range(ctx.num_ranks) if rank != ctx.cur_rank]
    for turn, n in enumerate((5, 40_000, 1, 3)):
        received = {rank: torch.empty(n, device=ctx.device) for rank in others}
        sends = [(dist.isend, value(n, ctx.cur_rank, rank, turn, ctx.device), rank) for rank in others]
        receives = [(dist.irecv, received[rank], rank) for rank in others]
        calls = [receives + sends, sends + receives, receives[::-1] + sends][turn % 3]
        if turn == 3:
            calls = sorted(calls, key=lambda call: (call[2] + ctx.cur_rank) % 3)
        if turn == ctx.cur_rank:
            time.sleep(0.02)
        handles = [call(tensor, rank, group=group) for call, tensor, rank in calls]
        for work in handles[::-1] if turn % 2 else handles:
            work.wait()
        for rank, tensor in received.items():
            assert_same_bits(tensor, value(n, rank, ctx.cur_rank, turn, "cpu"))
    dist.destroy_process_group(group)


@pytest.mark.ranks(*FEWER_HOSTS)
@pytest.mark.parametrize("fresh", [True, thorough(False)])
def test_messages_may_be_enqueued_in_any_order(ranks, fresh):
    ranks.run(exchange_with_all, fresh)


def pass_round(ctx):
    """Each receives from the one before it and sends to the next, the receiving enqueued first; messages in a row."""
    group, size, me = make_group(ctx), ctx.num_ranks, ctx.cur_rank
    for turn in range(3):
        sent = [value(9 + k, me, k, turn, ctx.device) for k in range(3)]
        received = [torch.empty_like(each) for each in sent]
        calls = [dist.P2POp(dist.irecv, each, (me - 1) % size, group) for each in received]
        calls += [dist.P2POp(dist.isend, each, (me + 1) % size, group) for each in sent]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        for k, each in enumerate(received):
            assert_same_bits(each, value(9 + k, (me - 1) % size, k, turn, "cpu"))
    if me == 0:
        dist.send(sent[0], size - 1, group=group)
    elif me == size - 1:
        future = dist.irecv(received[0], 0, group=group).get_future()
        assert_same_bits(future.wait()[0], value(9, 0, 0, 2, "cpu"))
    dist.destroy_process_group(group)


@pytest.mark.ranks(*FEWER_HOSTS)
def test_a_ring_that_receives_first(ranks):
    ranks.run(pass_round)


def send_other_sizes(ctx, sent, received):
    """Both are told, and the group is of no more use. Others are."""
    group, last = make_group(ctx), ctx.num_ranks - 1
    x = torch.ones(8, device=ctx.device)
    dist.all_reduce(x, group=group)
    if ctx.cur_rank in (0, last):
        text = rf"a message from rank 0 to rank {last} of {4 * sent} bytes.* of {4 * received} bytes"
        with pytest.raises((MismatchedCollectiveError, GroupAbortedError), match=text):
            if ctx.cur_rank == 0:
                dist.send(x[:sent], last, group=group)
            else:
                dist.recv(x[:received], 0, group=group)
        with pytest.raises(GroupAbortedError):
            dist.all_reduce(x, group=group)
    ctx.barrier()
    y = torch.ones(2, device=ctx.device)
    ctx.ccl.all_reduce(y, y)
    assert y.tolist() == [ctx.num_ranks] * 2
    dist.destroy_process_group(group)


@needs_gloo
@pytest.mark.ranks(Hosts(2, 2), Hosts(2, 2, dealt=True), Hosts(4, 1))
@pytest.mark.parametrize("sizes", [(5, 3), (0, 2), (2, 0)])
def test_messages_of_unequal_size_are_errors_on_both_ranks(ranks, mistaken, sizes):
    ranks.run(send_other_sizes, *sizes)


def ask_for_the_wrong(ctx):
    x, last = torch.ones(4, device=ctx.device), ctx.num_ranks - 1
    ctx.ccl.all_reduce(x, x)
    with pytest.raises(InvalidCollectiveError, match="with itself as the other rank"):
        ctx.ccl.send(x, ctx.cur_rank)
    with pytest.raises(InvalidCollectiveError, match="memory of their own"):
        ctx.ccl.send(x.to_sparse(), last)
    with pytest.raises(InvalidCollectiveError, match="is not a rank"):
        ctx.ccl.recv(x, 1.5)


@pytest.mark.ranks(Hosts(2, 2), Hosts(4, 1))
def test_wrong_arguments_are_told(ranks, mistaken):
    ranks.run(ask_for_the_wrong)


def wait_for_nobody(ctx):
    """A rank that fails while another waits for its first message."""
    group, last = make_group(ctx), ctx.num_ranks - 1
    x = torch.ones(4, device=ctx.device)
    dist.all_reduce(x, group=group)
    start = time.monotonic()
    if ctx.cur_rank == 0:
        time.sleep(0.1)
        group.abort()
    elif ctx.cur_rank == last:
        with pytest.raises((GroupAbortedError, PeerLostError), match=r"rank 0 called abort\(\)"):
            dist.recv(x, 0, group=group)
    assert time.monotonic() - start < 10
    ctx.barrier()
    dist.destroy_process_group(group)


@needs_gloo
@pytest.mark.ranks(Hosts(2, 2), Hosts(4, 1))
def test_nobody_waits_for_a_message_of_a_broken_group(ranks, mistaken):
    ranks.run(wait_for_nobody)


def send_first_in_a_capture(ctx):
    """A capture is played here; on GPUs the same call asks CUDA."""
    half = ctx.num_ranks // 2
    peer, number = (ctx.cur_rank + half) % ctx.num_ranks, torch.tensor([float(ctx.cur_rank)], device=ctx.device)
    got = torch.empty_like(number)

    def refuse(call):
        raise FirstUseInCaptureError(call)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("iris.ccl.over_hosts.refuse_in_capture", refuse)
        for call, tensor in ((ctx.ccl.send, number), (ctx.ccl.recv, got)):
            with pytest.raises(FirstUseInCaptureError, match=f"message between ranks {ctx.cur_rank} and {peer}"):
                call(tensor, peer)
    for call, tensor in ((ctx.ccl.send, number), (ctx.ccl.recv, got))[:: 1 if ctx.cur_rank < half else -1]:
        call(tensor, peer)
    assert got.item() == peer
    ctx.barrier()


@pytest.mark.ranks(Hosts(2, 1))
def test_the_first_message_of_two_ranks_is_not_in_a_capture(ranks):
    ranks.run(send_first_in_a_capture)


def let_go(ctx):
    """Links go with their context."""
    with iris.iris(1 << 16) as other:
        x, last = torch.ones(4, device=ctx.device), ctx.num_ranks - 1
        if ctx.cur_rank == 0:
            other.ccl.send(x, last)
        elif ctx.cur_rank == last:
            other.ccl.recv(x, 0)
        links = other._world.links
        assert len(links._links) == (ctx.cur_rank in (0, last))
    assert not links._links


@pytest.mark.ranks(Hosts(2, 2), Hosts(4, 1))
def test_links_go_with_their_context(ranks):
    ranks.run(let_go)
