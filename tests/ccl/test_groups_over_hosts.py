"""Process groups with members on several hosts: collectives, barriers, rails of their own, and what is refused."""

import time

import pytest
import torch
import torch.distributed as dist
from covering import thorough
from patterns import assert_same_bits, pattern
from rank_pool import FEWER_HOSTS, Hosts, needs_gloo

import iris
from ccl.calls import LAYOUTS, PLACES, Case, sample
from ccl.test_over_hosts import COMBINES, MOVES, combine, move_among
from ccl.test_results import MOVED, SHAPES, SUMMED, meaningful
from iris.ccl import ReduceOp, functional
from iris.errors import (
    FirstUseInCaptureError,
    GroupAbortedError,
    InvalidGroupError,
    MismatchedCollectiveError,
    SeveralHostsError,
    UnknownChoiceError,
)


def members_of(hosts, kind):
    """The groups of a kind, each by its members."""
    by_host = [hosts.ranks_of(host) for host in range(hosts.hosts)]
    if kind == "rails":
        return [sorted(rail) for rail in zip(*by_host, strict=True)]
    if kind == "hosts":
        return by_host
    if kind == "some of each host":
        return [sorted(rank for ranks in by_host for rank in ranks[-max(1, hosts.ranks_each - 1) :])]
    return [sorted(rank for ranks in by_host for rank in ranks)]


KINDS = [thorough("rails"), "hosts", "some of each host", thorough("all")]


def group_of(ctx, groups):
    """Every rank makes all of them. Returns the one that this rank is in, and its members."""
    made = [(dist.new_group(members), members) for members in groups]
    return next(((group, members) for group, members in made if ctx.cur_rank in members), (None, None))


def call_all(ctx, hosts, groups, moves, sums):
    group, members = group_of(ctx, groups)
    memory = ctx.empty(32 << 20, dtype=torch.uint8)
    if group is not None:
        move_among(ctx, moves, memory, members, group)
        combine(ctx, hosts, sums, members, group)
        dist.destroy_process_group(group)
    ctx.barrier()


@pytest.mark.ranks(*FEWER_HOSTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_group_has_the_collectives_of_all_ranks(ranks, kind):
    moves = [
        Case(collective, shape, dtype, root=root, input_place=source, output_place=target, layout=layout)
        for collective in MOVES
        for shape, dtype, root, source, target, layout in sample(
            4, f"{kind} {collective}", SHAPES, MOVED, range(ranks.num_ranks), PLACES, PLACES, LAYOUTS
        )[:20]
    ]
    shapes, layouts = [(0,), (1,), (3,), (1021,), (7, 33)], ["plain", "stepped", "in place"]
    sums = [
        (collective, shape, dtype, op, layout)
        for collective in COMBINES
        for shape, dtype, op, layout in sample(6, f"{kind} {collective}", shapes, SUMMED, ReduceOp, layouts)[:20]
        if meaningful(dtype, op)
    ]
    ranks.run(call_all, ranks.hosts, members_of(ranks.hosts, kind), moves, sums)


def use_a_mesh(ctx, hosts, rails, by_host):
    """Calls along and across the hosts, in turns, while each rank in turn is late: no bit depends on it."""
    along, members = group_of(ctx, rails)
    across, neighbours = group_of(ctx, by_host)
    for turn in range(2 * ctx.num_ranks):
        if turn % ctx.num_ranks == ctx.cur_rank:
            time.sleep(0.02)
        x = pattern((64,), torch.int32, ctx.cur_rank, turn).to(ctx.device)
        shard = ctx.empty(64 // len(neighbours), dtype=torch.int32)
        ctx.ccl.reduce_scatter(shard, x[: len(shard) * len(neighbours)], group=across)
        work = ctx.ccl.all_reduce(shard, shard, group=along, async_op=True)
        assert work.wait()
        total = torch.zeros(64, dtype=torch.int32)
        for rank in range(ctx.num_ranks):
            total += pattern((64,), torch.int32, rank, turn)
        begin = neighbours.index(ctx.cur_rank) * len(shard)
        assert_same_bits(shard, total[begin : begin + len(shard)])
        ctx.device_barrier(along)
        ctx.ccl.barrier(group=across)
    for stranger in {*range(ctx.num_ranks)} - {*members}:
        with pytest.raises(UnknownChoiceError):
            ctx.ccl.broadcast(shard, stranger, group=along)
    name, ones = functional.name_of(ctx, along), torch.ones(3, device=ctx.device, requires_grad=True)
    functional.all_reduce(ones, name).sum().backward()
    assert ones.grad.tolist() == [len(members)] * 3


@pytest.mark.ranks(*FEWER_HOSTS)
def test_a_mesh_reduces_within_hosts_and_over_them(ranks):
    hosts = ranks.hosts
    ranks.run(use_a_mesh, hosts, members_of(hosts, "rails"), members_of(hosts, "hosts"))


def note_when(ctx, members):
    """When each member came to a barrier of the group, and when it left."""
    group, times = dist.new_group(members), []
    for turn in members if ctx.cur_rank in members else ():
        ctx.device_barrier(group)
        if turn == ctx.cur_rank:
            time.sleep(0.05)
        came = time.monotonic()
        ctx.device_barrier(group)
        if ctx.device.type == "cuda":
            torch.cuda.synchronize()
        times.append((came, time.monotonic()))
    return times


@pytest.mark.ranks(Hosts(2, 2), Hosts(2, 3))
@pytest.mark.parametrize("kind", ["rails", "some of each host"])
def test_nobody_leaves_a_barrier_of_a_group_before_its_members_of_all_hosts_have_come(ranks, kind):
    members = members_of(ranks.hosts, kind)[-1]
    times = ranks.run(note_when, members)
    assert not any(times[rank] for rank in range(ranks.num_ranks) if rank not in members)
    for turn in zip(*(times[rank] for rank in members), strict=True):
        assert max(came for came, _ in turn) <= min(left for _, left in turn)


def ask_for_uneven_hosts(ctx, members):
    """Alike on all members, who go on."""
    group, x = dist.new_group(members), torch.ones(4, device=ctx.device)
    if ctx.cur_rank in members:
        text = r"same number of ranks on each, and these differ: 2 on host0, 1 on host1 \(.*\)\. Use a group with"
        for call in (lambda: ctx.ccl.all_reduce(x, x, group=group), lambda: ctx.device_barrier(group)):
            with pytest.raises(InvalidGroupError, match=text):
                call()
        ctx.barrier(group=group)
    ctx.ccl.all_reduce(x, x)
    assert x.tolist() == [ctx.num_ranks] * 4


@pytest.mark.ranks(Hosts(2, 2), exactly=True)
def test_a_group_with_other_numbers_on_each_host_is_refused(ranks):
    ranks.run(ask_for_uneven_hosts, [0, 1, 2])


def ask_for_strangers(ctx, members):
    """A context of some of the ranks, and a group of others."""
    some, everyone, x = dist.new_group(members), dist.new_group(), torch.ones(4, device=ctx.device)
    if ctx.cur_rank in members:
        with iris.iris(1 << 16, process_group=some) as part:
            with pytest.raises(InvalidGroupError, match=r"The group has ranks? .*, and this context has .*iris\.iris"):
                part.ccl.all_reduce(x, x, group=everyone)
    ctx.barrier()


@pytest.mark.ranks(Hosts(2, 2), exactly=True)
def test_a_group_with_ranks_outside_of_the_context_is_refused(ranks):
    ranks.run(ask_for_strangers, [0, 2])


def ask_for_what_a_group_has_not(ctx, members):
    """On the rank that asks, which meets nobody for it."""
    group, x = dist.new_group(members), torch.ones(4, device=ctx.device)
    if ctx.cur_rank == members[0]:
        with pytest.raises(SeveralHostsError, match="Use a group of ranks that are on one host"):
            ctx.ccl.all_reduce_preamble(x, x, group=group)
    if ctx.cur_rank in members:
        ctx.ccl.all_reduce(x, x, group=group)
        with pytest.raises(SeveralHostsError, match="Config"):
            ctx.ccl.all_reduce(x, x, group=group, config=iris.ccl.Config(comm_sms=1))
    ctx.barrier()


@pytest.mark.ranks(Hosts(2, 2))
def test_what_is_for_groups_within_a_host_says_so(ranks):
    ranks.run(ask_for_what_a_group_has_not, members_of(ranks.hosts, "rails")[0])


def use_first_in_a_capture(ctx, members):
    """A capture is played here; on GPUs the same call asks CUDA."""
    group, x = dist.new_group(members), torch.ones(4, device=ctx.device)

    def refuse(call):
        raise FirstUseInCaptureError(call)

    if ctx.cur_rank in members:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("iris.ccl.spans.refuse_in_capture", refuse)
            with pytest.raises(FirstUseInCaptureError, match=r"all_reduce\(\)"):
                ctx.ccl.all_reduce(x, x, group=group)
            assert group not in ctx._spanning
        ctx.ccl.all_reduce(x, x, group=group)
        assert x.tolist() == [len(members)] * 4
    ctx.barrier()


@pytest.mark.ranks(Hosts(2, 2))
def test_the_first_use_of_a_group_is_not_in_a_capture(ranks):
    ranks.run(use_first_in_a_capture, members_of(ranks.hosts, "rails")[0])


def let_go(ctx, members):
    """The rail of a group goes with the group, or with the context."""
    x = torch.ones(4, device=ctx.device)
    before = len(ctx._spanning)
    with iris.iris(1 << 16) as other:
        for _ in range(2):
            group = dist.new_group(members)
            if ctx.cur_rank in members:
                ctx.ccl.all_reduce(x, x, group=group)
                other.ccl.all_gather(torch.empty(4 * len(members), device=ctx.device), x, group=group)
                assert len(ctx._spanning) == before + 1
                dist.destroy_process_group(group)
            ctx.barrier()
            assert len(ctx._spanning) == before
        rails = [part.rail for part in other._spanning.values()]
    assert not any(hasattr(rail, "_engine") for rail in rails)


@pytest.mark.ranks(Hosts(2, 2), Hosts(2, 3))
def test_rails_go_with_their_groups(ranks):
    ranks.run(let_go, members_of(ranks.hosts, "some of each host")[0])


def call_differently(ctx, members):
    """The group is of no more use. The context, and its other groups, go on."""
    group, other = dist.new_group(members), dist.new_group(members)
    if ctx.cur_rank in members:
        x = torch.ones(4 + (ctx.cur_rank == members[0]))
        with pytest.raises((MismatchedCollectiveError, GroupAbortedError), match="rank . on host0 calls .*; rank"):
            ctx.ccl.all_reduce(x, x, group=group)
        with pytest.raises(GroupAbortedError):
            ctx.ccl.all_reduce(x, x, group=group)
        y = torch.ones(3)
        ctx.ccl.all_reduce(y, y, group=other)
        assert y.tolist() == [len(members)] * 3
    y = torch.ones(3)
    ctx.ccl.all_reduce(y, y)
    assert y.tolist() == [ctx.num_ranks] * 3


@needs_gloo
@pytest.mark.ranks(Hosts(2, 2), Hosts(2, 2, dealt=True))
def test_hosts_that_call_differently_break_their_group_alone(ranks):
    ranks.run(call_differently, members_of(ranks.hosts, "rails")[-1])
