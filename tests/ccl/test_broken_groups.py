"""A group whose ranks are out of step is broken: its calls are errors on every rank, those of other groups go on."""

import functools
import random
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from covering import EVERYTHING, covering

import iris
from ccl.calls import filled
from iris.ccl import Config, ReduceOp
from iris.ccl.refusal import DTYPES, UNKNOWN, size_of_call
from iris.errors import (
    GroupAbortedError,
    InvalidCollectiveError,
    InvalidConfigError,
    IrisError,
    IrisTimeoutError,
    MismatchedCollectiveError,
    NotATensorError,
    UnsupportedReductionError,
    WrongDeviceError,
)
from iris.runtime import workspace
from iris.runtime.abort import SIZES_KEPT

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


def settle(ctx):
    """On a GPU, whose kernels tell it later: when all are over, every rank knows. Each would else go on with some calls
    that others refuse, and wait for them."""
    if ctx.device.type == "cuda":
        torch.cuda.synchronize(ctx.device)
        dist.barrier()


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
    for seed in range(20 if EVERYTHING else 4):
        chosen = random.Random(seed)
        pairs = [(chosen.choice(some), chosen.choice(some)) for _ in range(8)]
        rows.append([(5, 6), *pairs, *[(size, size) for size in chosen.sample(some, 1 + seed % 2)]])
    return rows


@pytest.mark.ranks(2)
@pytest.mark.parametrize("pairs", in_a_row(), ids=str)
def test_unequal_messages_in_a_row_leave_nobody_waiting(ranks, mistaken, pairs):
    ranks.run(unaware, pairs)


def at_root(ccl, wrong, right):
    """An argument that all ranks give, wrong on rank 0 alone."""
    return right if ccl._context.cur_rank else wrong


def broadcast_of(tensor, x, ccl, **options):
    ccl.broadcast(tensor, 0, **options)


def gather_of(tensor, x, ccl, **options):
    ccl.gather(x.new_empty(len(x) * options["group"].size()), tensor, 0, **options)


def scatter_of(tensor, x, ccl, **options):
    ccl.scatter(tensor, x.new_zeros(len(x) * options["group"].size()), 0, **options)


def reduce_of(tensor, x, ccl, **options):
    ccl.reduce(torch.empty_like(x), tensor, 0, **options)


ROOTED = [broadcast_of, gather_of, scatter_of, reduce_of]

# What rank 0 refuses, as the root, where the others have nothing to refuse; and how all call it.
REFUSED = {
    "no output": (NotATensorError, lambda ccl, x, group: ccl.gather(None, x, 0, group=group)),
    "a short output": (InvalidCollectiveError, lambda ccl, x, group: ccl.gather(x.clone(), x, 0, group=group)),
    "no input": (NotATensorError, lambda ccl, x, group: ccl.scatter(x, None, 0, group=group)),
    "another dtype": (InvalidCollectiveError, lambda ccl, x, group: ccl.scatter(x, x.double(), 0, group=group)),
    "no sum": (NotATensorError, lambda ccl, x, group: ccl.reduce(None, x, 0, group=group)),
    "no sum of multiples": (
        NotATensorError,
        lambda ccl, x, group: ccl.reduce(None, x, 0, op=dist._make_nccl_premul_sum(0.5), group=group),
    ),
    "an average of integers": (
        UnsupportedReductionError,
        lambda ccl, x, group: reduce_of(
            x.int(), x.int(), ccl, op=at_root(ccl, ReduceOp.AVG, ReduceOp.SUM), group=group
        ),
    ),
}
for call in ROOTED:
    wrong = {
        "no tensor": (NotATensorError, lambda ccl, x, group, of=call: of(at_root(ccl, None, x), x, ccl, group=group)),
        "a tensor elsewhere": (
            WrongDeviceError,
            lambda ccl, x, group, of=call: of(at_root(ccl, x.to("meta"), x), x, ccl, group=group),
        ),
        "no config": (
            InvalidConfigError,
            lambda ccl, x, group, of=call: of(x, x, ccl, group=group, config=at_root(ccl, "fast", None)),
        ),
    }
    REFUSED |= {f"{what}, {call.__name__}": each for what, each in wrong.items()}


def refused(ctx, name, is_first):
    error, call = REFUSED[name]
    broken, whole = dist.new_group(), dist.new_group()
    x = filled(ctx, 4)
    for group in (whole,) if is_first else (broken, whole):
        ctx.ccl.all_reduce(torch.empty_like(x), x, group=group)
    raised = []
    attempts = (
        lambda: call(ctx.ccl, x, broken), lambda: settle(ctx), lambda: ctx.device_barrier(broken), ctx.barrier,
    )  # fmt: skip
    for attempt in attempts:
        try:
            attempt()
        except IrisError as found:
            raised.append(found)
    if ctx.cur_rank == 0:
        assert type(raised[0]) is error
    if ctx.device.type == "cpu":  # on a GPU a kernel that waits in a later call has its time limit alone
        assert not any(isinstance(each, IrisTimeoutError) for each in raised)
    with pytest.raises(GroupAbortedError, match="rank 0 is the root of .*, and refused it"):
        ctx.ccl.all_reduce(torch.empty_like(x), x, group=broken)
    ctx.ccl.all_reduce(torch.empty_like(x), x, group=whole)
    ctx.barrier()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_what_the_root_refuses_is_an_error_on_every_rank(ranks, mistaken, name, is_first):
    ranks.run(refused, name, is_first)


def refused_alone(ctx, name):
    error, call = REFUSED[name]
    x = filled(ctx, 4)
    group = [dist.new_group([rank]) for rank in range(ctx.num_ranks)][ctx.cur_rank]
    if ctx.cur_rank == 0:
        with pytest.raises(error):
            call(ctx.ccl, x, group)
    ctx.ccl.all_reduce(out := torch.empty_like(x), x, group=group)
    assert torch.equal(out, x)


@pytest.mark.parametrize("name", [name for name in REFUSED if name != "a short output"])
def test_a_refusal_does_not_break_a_group_of_one(ranks, name):
    ranks.run(refused_alone, name)


@mock.patch.dict(workspace.SMALLEST_BLOCK, cpu=0, cuda=0)
def takes_part(ctx, call, elements, is_used):
    """Who waits for the root gets as much data as it waits for: kernels on a GPU do not see that a group is broken.

    In a first call of a size the ranks meet to make room, as blocks have none to spare here.
    """
    broken, x = dist.new_group(), filled(ctx, elements).double()
    ctx.ccl.communicator(broken)
    if is_used:
        call(x.clone(), x, ctx.ccl, group=broken)
    if ctx.cur_rank:
        call(x, x, ctx.ccl, group=broken)
        if call in (broadcast_of, scatter_of):
            assert x.count_nonzero() == 0
    else:
        with pytest.raises(NotATensorError):
            call("none", x, ctx.ccl, group=broken)
    ctx.barrier()
    with pytest.raises(GroupAbortedError, match="rank 0 is the root of .*, and refused it"):
        call(x, x, ctx.ccl, group=broken)


@pytest.mark.ranks(2, exactly=True)
@pytest.mark.parametrize("is_used", [True, False])
@pytest.mark.parametrize("elements", [5, 300_000])
@pytest.mark.parametrize("call", ROOTED)
def test_the_root_takes_part_in_a_call_of_which_it_has_no_tensor(ranks, mistaken, call, elements, is_used):
    ranks.run(takes_part, call, elements, is_used)


def refused_by_all(ctx):
    group, x = dist.new_group(), filled(ctx, 4)
    for call in ROOTED:
        for wrong, error in ((None, NotATensorError), (x.to("meta"), WrongDeviceError)):
            with pytest.raises(error):
                call(wrong, x, ctx.ccl, group=group)
        call(x.clone(), x, ctx.ccl, group=group)
    ctx.ccl.all_reduce(total := torch.empty_like(x), x, group=group)
    assert total.tolist() == sum(filled(ctx, 4) - 1000 * ctx.cur_rank + 1000 * r for r in range(ctx.num_ranks)).tolist()


@pytest.mark.ranks(3)
def test_what_all_ranks_refuse_breaks_no_group(ranks, mistaken):
    ranks.run(refused_by_all)


def sizes_of_calls(ctx):
    """A member may be ahead of the root that refuses a call: which size that has is known until its word is reused."""
    group, rounds = dist.new_group(), 20
    for number in range(1, rounds + 1):
        x = filled(ctx, number).to(torch.float64 if number % 3 else torch.float32)
        ROOTED[number % 4](x, x.clone(), ctx.ccl, group=group)
    ctx.barrier()
    comm = ctx.ccl.communicator(group)
    for number in range(1, rounds + 1):
        comm.rooted = number
        dtype = torch.float64 if number % 3 else torch.float32
        kind = DTYPES.index(dtype if ROOTED[number % 4] is reduce_of else torch.uint8)
        known = number > rounds - SIZES_KEPT + 1
        for member in range(comm.size):
            found = size_of_call(comm, member)
            assert found == (dtype.itemsize * number * len(DTYPES) + kind if known else UNKNOWN)


@pytest.mark.ranks(2)
def test_a_root_that_refuses_knows_how_large_the_call_is(ranks, mistaken):
    ranks.run(sizes_of_calls)


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
