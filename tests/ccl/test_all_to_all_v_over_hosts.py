"""all_to_all_v over several hosts: counts that do not agree, or that a rank cannot use, are errors on every rank."""

import functools

import pytest
import torch
import torch.distributed as dist
from covering import EVERYTHING, SAMPLED
from rank_pool import FEWER_HOSTS, Hosts

from ccl.calls import filled
from iris.errors import InvalidCollectiveError, MismatchedCollectiveError, NotATensorError


def exchange(ctx, turn, send=None, expect=None, group=None, as_tensors=False):
    """``send[s][d]`` elements from member s to d; ``expect[d][s]`` of these at d. By default as many, by turns."""
    members = list(range(ctx.num_ranks)) if group is None else dist.get_process_group_ranks(group)
    size, me = len(members), members.index(ctx.cur_rank)
    send = send or [[(3 * s + 5 * d + turn) % 7 for d in range(size)] for s in range(size)]
    expect = expect or [[send[s][d] for s in range(size)] for d in range(size)]
    begins = [[sum(row[:d]) for d in range(size)] for row in send]
    places = [sum(expect[me][:s]) for s in range(size)]
    x = filled(ctx, max(sum(send[me]), 1), turn)
    output = torch.full((sum(expect[me]) + 1,), -1.0, device=ctx.device)
    lists = send[me], begins[me], expect[me], places
    if as_tensors:
        lists = [torch.tensor(numbers, dtype=torch.int64, device=ctx.device) for numbers in lists]
    ctx.ccl.all_to_all_v(output, x, *lists, group=group)
    for s, rank in enumerate(members):
        theirs = torch.arange(send[s][me]) + begins[s][me] + 1000.0 * (rank + 1) + turn
        assert torch.equal(output[places[s] : places[s] + expect[me][s]].cpu(), theirs)
    assert output[-1] == -1


def exchange_by_turns(ctx):
    """Other counts each time; none for some, or for all; from hosts that have nothing for another."""
    size = ctx.num_ranks
    for turn in range(2 if SAMPLED else 5):
        exchange(ctx, turn, as_tensors=turn % 2 == 1)
    exchange(ctx, 5, [[0] * size] * size)
    exchange(ctx, 6, [[4 * (s == 0) * (d == size - 1) for d in range(size)] for s in range(size)])


@pytest.mark.ranks(*FEWER_HOSTS)
def test_counts_may_be_any(ranks):
    ranks.run(exchange_by_turns)


def exchange_in_a_group(ctx, members):
    group = dist.new_group(members)
    if ctx.cur_rank in members:
        for turn in range(3):
            exchange(ctx, turn, group=group)
    ctx.barrier()


@pytest.mark.thorough
@pytest.mark.ranks(Hosts(2, 2, dealt=True), Hosts(2, 3))
def test_a_group_over_hosts_has_counts_of_its_members(ranks):
    hosts = ranks.hosts
    ranks.run(exchange_in_a_group, sorted(rank for host in range(2) for rank in hosts.ranks_of(host)[-2:]))


def disagree(ctx, sender, receiver):
    """A pair of ranks disagrees: all are told which. Nothing has moved, and the ranks go on."""
    size = ctx.num_ranks
    send = [[1] * size for _ in range(size)]
    expect = [[1] * size for _ in range(size)]
    expect[receiver][sender] = 3
    told = f"rank {sender} sends 1 elements to rank {receiver}, which expects 3"
    with pytest.raises(MismatchedCollectiveError, match=f"do not agree: {told}. Nothing"):
        exchange(ctx, 0, send, expect)
    exchange(ctx, 1)


@pytest.mark.ranks(Hosts(2, 2, dealt=True), *((Hosts(2, 2), Hosts(4, 1)) if EVERYTHING else ()))
def test_ranks_that_do_not_agree_are_told(mistaken, ranks):
    last = ranks.num_ranks - 1
    for pair in ((0, last), (last, 0), (0, 1), (1, 1)):
        ranks.run(disagree, *pair)


def refuse(ctx, refusing):
    """One rank's arguments are of no use: it is told why, and the others that it was. All go on."""
    size, x = ctx.num_ranks, torch.ones(2 * ctx.num_ranks, device=ctx.device)
    ones, places = [1] * size, list(range(size))
    call = functools.partial(ctx.ccl.all_to_all_v, torch.empty_like(x))
    wrong = (
        (lambda: call(x, [1, -1, *ones[2:]], places, ones, places), "send_counts takes"),
        (lambda: call(x, ones, [2 * size, *places[1:]], ones, places), "the input has"),
        (lambda: call(x.view(2, -1).t(), ones, places, ones, places), "must be contiguous"),
        (lambda: call(None, ones, places, ones, places), "takes tensors"),
        (lambda: call(x.to_sparse(), ones, places, ones, places), "memory of their own"),
    )
    for made, text in wrong:
        if ctx.cur_rank == refusing:
            with pytest.raises((InvalidCollectiveError, NotATensorError), match=text):
                made()
        else:
            with pytest.raises(MismatchedCollectiveError, match=f"rank {refusing} could not use its own arguments"):
                call(x, ones, places, ones, places)
    wide = x.double() if ctx.cur_rank == refusing else x
    with pytest.raises(MismatchedCollectiveError, match=f"of one dtype on all ranks; .* 8 on rank {refusing}"):
        ctx.ccl.all_to_all_v(torch.empty_like(wide), wide, ones, places, ones, places)
    exchange(ctx, 0)


@pytest.mark.ranks(Hosts(2, 2), *([Hosts(3, 2)] if EVERYTHING else []))
def test_nobody_waits_for_a_rank_that_refuses(mistaken, ranks):
    ranks.run(refuse, 1)
