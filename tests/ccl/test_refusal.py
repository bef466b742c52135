"""What the root of a collective refuses, and the others have nothing to say against, is an error on every rank."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ccl.calls import filled, settle
from iris.ccl import ReduceOp
from iris.ccl.refusal import DTYPES, UNKNOWN, size_of_call
from iris.errors import (
    GroupAbortedError,
    InvalidCollectiveError,
    InvalidConfigError,
    IrisError,
    IrisTimeoutError,
    NotATensorError,
    UnsupportedReductionError,
    WrongDeviceError,
)
from iris.runtime import workspace
from iris.runtime.abort import SIZES_KEPT


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
    **{
        f"a list of which one is {what}": (
            InvalidCollectiveError,
            lambda ccl, x, group, other=other: ccl.scatter(
                x, [x.to(other), *[x] * (group.size() - 1)] if ccl._context.cur_rank == 0 else None, 0, group=group
            ),
        )
        for what, other in {"elsewhere": "meta", "wider": torch.float64}.items()
    },
    "no sum": (NotATensorError, lambda ccl, x, group: ccl.reduce(None, x, 0, group=group)),
    "no sum of multiples": (
        NotATensorError,
        lambda ccl, x, group: ccl.reduce(None, x, 0, op=dist._make_nccl_premul_sum(0.5), group=group),
    ),
    "multiples of integers": (
        UnsupportedReductionError,
        lambda ccl, x, group: reduce_of(
            x.int(), x.int(), ccl, op=at_root(ccl, dist._make_nccl_premul_sum(0.5), ReduceOp.SUM), group=group
        ),
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
