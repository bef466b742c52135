"""A group whose ranks are out of step is broken: its calls are errors on every rank, those of other groups go on."""

import functools
import random
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from covering import EVERYTHING, SAMPLED, covering

import iris
from ccl.calls import filled, settle
from iris.ccl import Config
from iris.errors import GroupAbortedError, MismatchedCollectiveError

GUARD = 32


class Room:
    """Memory for a result between zeros, on the heap or not."""

    def __init__(self, ctx, on_heap):
        make = ctx.zeros if on_heap else functools.partial(torch.zeros, device=ctx.device)
        self.whole, self.used, self.on_heap = make(1 << 19), slice(0), on_heap

    def take(self, elements):
        self.whole.zero_()
        self.used = slice(GUARD, GUARD + elements)
        return self.whole[self.used]

    def is_kept_around(self):
        return not self.whole[: self.used.start].any() and not self.whole[self.used.stop :].any()


def offsets(counts):
    return [sum(counts[:i]) for i in range(len(counts))]


def send(ctx, sent, received, room, **options):
    """From rank 0 to the last one."""
    last = ctx.num_ranks - 1
    if ctx.cur_rank == 0:
        ctx.ccl.send(filled(ctx, sent), last, **options)
    elif ctx.cur_rank == last:
        ctx.ccl.recv(room.take(received), 0, **options)


def gather(ctx, sent, received, room, **options):
    """To rank 0, where the last one sends another number."""
    last = ctx.num_ranks - 1
    inbox = room.take(received * ctx.num_ranks)
    ctx.ccl.gather(inbox, filled(ctx, sent if ctx.cur_rank == last else received), 0, **options)


def scatter(ctx, sent, received, room, **options):
    """From rank 0, of which the last one takes another number."""
    elements = received if ctx.cur_rank == ctx.num_ranks - 1 else sent
    ctx.ccl.scatter(room.take(elements), filled(ctx, sent * ctx.num_ranks), 0, **options)


def all_to_all_v(ctx, sent, received, room, *, config, pair=(0, -1), **options):
    """Pieces of other sizes for each pair; that of one does not fit. On a GPU also with counts there."""
    rank, size = ctx.cur_rank, ctx.num_ranks
    source, target = (each % size for each in pair)
    sends = [sent if (rank, peer) == (source, target) else 100 * peer + rank for peer in range(size)]
    receives = [received if (peer, rank) == (source, target) else 100 * rank + peer for peer in range(size)]
    lists = [sends, offsets(sends), receives, offsets(receives)]
    if room.on_heap and ctx.device.type == "cuda":
        lists = [torch.tensor(each, device=ctx.device) for each in lists]
    ctx.ccl.all_to_all_v(room.take(sum(receives)), filled(ctx, sum(sends)), *lists, **options)


def all_to_all_v_of_one(ctx, sent, received, room, **options):
    """The last one alone sees that what it sends to itself does not fit."""
    all_to_all_v(ctx, sent, received, room, pair=(-1, -1), **options)


# Elements: of one block; of none; through the slots of a queue several times, by more programs than the other end has;
# and on both sides of the size from which results on the heap are written where they are.
SIZES = [(3, 4), (4, 3), (0, 4), (4, 0), (90_000, 70_000), (4, 90_000), (90_000, 4), (17_000, 16_000)]
CALLS = [send, gather, scatter, all_to_all_v, all_to_all_v_of_one]
CASES = covering(CALLS, SIZES, [False, True], [False, True], [2, 3])


def until_it_is_told(ctx, group, *calls):
    """What the calls raise, one after the other; and then each call of the group raises that it is broken."""
    errors = []
    more = (lambda: settle(ctx), lambda: ctx.device_barrier(group), lambda: ctx.barrier(group=group))
    for call in (*calls, *more):
        try:
            call()
        except (GroupAbortedError, MismatchedCollectiveError) as error:
            errors.append(str(error))
    assert errors and all("messages" in each and "bytes" in each for each in errors), errors
    x = torch.ones(4, device=ctx.device)
    for call in (lambda: ctx.ccl.all_reduce(x, x, group=group), lambda: ctx.barrier(group=group)):
        with pytest.raises(GroupAbortedError, match="(?s)sizes of messages do not agree.*iris.iris"):
            call()


def unequal(ctx, case):
    call, (sent, received), on_heap, use_gluon, _ = CASES[case]
    broken, whole = dist.new_group(), dist.new_group()
    x = filled(ctx, 4)
    for group in (broken, whole):
        ctx.ccl.all_reduce(torch.empty_like(x), x, group=group)
    config = Config(use_gluon=use_gluon)
    room = Room(ctx, on_heap)
    # Equal ones go through. Of the same sizes, so that both kernels are compiled, and no wait comes to its limit.
    for elements in dict.fromkeys((5, sent, received)):
        call(ctx, elements, elements, room, group=broken, config=config)
    until_it_is_told(ctx, broken, lambda: call(ctx, sent, received, room, group=broken, config=config))
    assert room.is_kept_around()
    total = torch.empty_like(x)
    ctx.ccl.all_reduce(total, x, group=whole)
    assert total.tolist() == sum(filled(ctx, 4) - 1000 * ctx.cur_rank + 1000 * r for r in range(ctx.num_ranks)).tolist()
    ctx.barrier()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("call", CALLS)
def test_messages_of_unequal_size_break_the_group(ranks, mistaken, call):
    for case, (called, *_, num_ranks) in enumerate(CASES):
        if called is call and num_ranks == min(max(ranks.num_ranks, 2), 3):  # under torchrun there may be others
            ranks.run(unequal, case)


def unaware(ctx, pairs):
    """What is enqueued before the hosts know of the first unequal message; here they do not ask."""
    group = dist.new_group()
    room = Room(ctx, len(pairs) % 2 == 0)
    # Both ends are compiled before, so that no wait comes to its limit.
    for elements in dict.fromkeys(elements for pair in pairs for elements in pair):
        send(ctx, elements, elements, room, group=group)
    ctx.barrier()
    comm = ctx.ccl.communicator(group)
    flag, comm.abort_flag, comm.state = comm.abort_flag, SimpleNamespace(raise_recorded=lambda describe: None), [0]
    try:
        for sent, received in pairs:
            send(ctx, sent, received, room, group=group)
    finally:
        comm.abort_flag, comm.state = flag, flag.state
    settle(ctx)
    sent, received = pairs[-1]
    if ctx.cur_rank and sent == received:
        assert torch.equal(room.whole[room.used], filled(ctx, sent) - 1000 * ctx.cur_rank)
    assert room.is_kept_around()
    dist.barrier()
    until_it_is_told(ctx, group)
    ctx.barrier()


def in_a_row():
    """As a batch to a receiver of another dtype; in another order; and of any sizes."""
    some = [0, 4, 5, 9_000, 16_000, 17_000, 70_000, 90_000]
    rows = [[pair] * 12 for pair in [(3, 4), (5, 16_000), (90_000, 70_000), (70_000, 90_000)]]
    rows += [[(4, 90_000), (90_000, 4), (4, 4)], [(90_000, 5), (5, 90_000), (90_000, 90_000)]]
    for seed in range(20 if EVERYTHING else 2 if SAMPLED else 4):
        chosen = random.Random(seed)
        pairs = [(chosen.choice(some), chosen.choice(some)) for _ in range(8)]
        rows.append([(5, 6), *pairs, *[(size, size) for size in chosen.sample(some, 1 + seed % 2)]])
    return rows[:: 4 if SAMPLED else 1]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("pairs", in_a_row(), ids=str)
def test_unequal_messages_in_a_row_leave_nobody_waiting(ranks, mistaken, pairs):
    ranks.run(unaware, pairs)


def broken_context(ctx):
    own = iris.iris(1 << 20)
    x, y = torch.ones(4, device=ctx.device), torch.empty(4, device=ctx.device)
    a, c = (torch.ones(16, 16, device=ctx.device) for _ in range(2))
    own.ccl.all_reduce(y, x)
    own.barrier()
    ctx.barrier()
    if own.cur_rank == 0:
        own.ccl.communicator().abort_flag.abort("rank 0 says so.")
    ctx.barrier()
    ops, weight = own.ops, torch.ones(16, device=ctx.device)
    calls = [
        lambda: own.ccl.all_reduce(y, x), lambda: own.ccl.broadcast(x), lambda: own.ccl.send(x, 0),
        lambda: own.ccl.barrier(), own.device_barrier, own.barrier,
        lambda: ops.matmul_all_reduce(c, a, a), lambda: ops.matmul_all_reduce_preamble(c, a, a),
        lambda: ops.all_reduce_rms_norm(c, a, weight),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(GroupAbortedError, match="rank 0 says so"):
            call()
    own.close()
    with iris.iris(1 << 20) as again:
        again.ccl.all_reduce(y, x)
        again.barrier()
    assert y.tolist() == [ctx.num_ranks] * 4
    ctx.ccl.all_reduce(y, x)
    ctx.barrier()


@pytest.mark.ranks(2)
def test_every_call_of_a_broken_context_is_an_error_and_a_new_one_works(ranks):
    ranks.run(broken_context)
