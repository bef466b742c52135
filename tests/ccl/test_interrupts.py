"""An interrupt in a call or in a meeting of the hosts breaks the group, and nobody waits for who has left."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
from conftest import UNDER_TORCHRUN

import iris
from ccl.calls import filled
from iris.ccl import enqueue
from iris.errors import GroupAbortedError
from iris.simulator import grid


def interrupt(_):
    """Once all programs of a launch wait."""
    grid.watchers.remove(interrupt)
    os.kill(os.getpid(), signal.SIGINT)


def interrupted(ctx):
    """Ctrl-C on rank 0, in a call for which the last rank does not come."""
    broken, last = dist.new_group(), ctx.num_ranks - 1
    x = filled(ctx, 4)
    ctx.ccl.all_reduce(x, x, group=broken)
    ctx.barrier()
    if ctx.cur_rank == 0:
        grid.watchers.append(interrupt)
        with pytest.raises(KeyboardInterrupt):
            ctx.ccl.all_reduce(x, x, group=broken)
    elif ctx.cur_rank != last:
        with pytest.raises(GroupAbortedError, match="all_reduce.. of rank 0 ended with KeyboardInterrupt"):
            ctx.ccl.all_reduce(x, x, group=broken)
    dist.barrier()
    with pytest.raises(GroupAbortedError, match="all_reduce.. of rank 0 ended with KeyboardInterrupt"):
        ctx.ccl.all_gather(torch.empty(4 * ctx.num_ranks, device=ctx.device), x, group=broken)
    ctx.barrier()


@pytest.mark.skipif(UNDER_TORCHRUN, reason="on a GPU a call does not wait")
@pytest.mark.ranks(3)
def test_an_interrupt_breaks_the_group_and_who_waits_leaves(ranks, mistaken):
    ranks.run(interrupted)


FIRST_CALLS = {
    "all_gather": lambda ccl, out, x, group: ccl.all_gather(out, x, group=group),
    "broadcast": lambda ccl, out, x, group: ccl.broadcast(x, group=group),
    "all_reduce": lambda ccl, out, x, group: ccl.all_reduce(x, x, group=group),
}


def interrupted_while_it_prepares(ctx, name):
    """Ctrl-C on rank 0, in the first call of its kind, which has launched nothing yet."""
    call = FIRST_CALLS[name]
    broken = dist.new_group()
    x, out = filled(ctx, 12), filled(ctx, 12 * ctx.num_ranks)
    ctx.ccl.communicator(broken)

    def interrupt(*_):
        raise KeyboardInterrupt

    if ctx.cur_rank == 0:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(enqueue, "prepare", interrupt)
            call(ctx.ccl, out, x, broken)
    dist.barrier()
    with pytest.raises(GroupAbortedError, match=f"{name}.. of rank 0 ended with KeyboardInterrupt"):
        call(ctx.ccl, out, x, broken)
    ctx.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", FIRST_CALLS)
def test_an_interrupt_before_the_launch_breaks_the_group(ranks, mistaken, name):
    ranks.run(interrupted_while_it_prepares, name)


MEETINGS = {
    "barrier": lambda own, group, x: own.barrier(),
    "barrier of a group": lambda own, group, x: own.barrier(group=group),
    "broadcast": lambda own, group, x: own.broadcast(3),
    "first device barrier": lambda own, group, x: own.device_barrier(group),
    "first collective": lambda own, group, x: own.ccl.all_reduce(x, x, group=group),
    "first collective of a size": lambda own, group, x: own.ccl.all_gather(x.new_empty(own.num_ranks * len(x)), x),
}


def left_in_a_meeting(ctx, name):
    """Ctrl-C on rank 0 while it waits for the others on the host; they come later."""
    own, group, call = iris.iris(1 << 20), dist.new_group(), MEETINGS[name]
    x = filled(ctx, 12)

    def interrupt(*_):
        raise KeyboardInterrupt

    if ctx.cur_rank == 0:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("iris.world.group.await_keys", interrupt)
            call(own, group, x)
    dist.barrier()
    for _ in range(2):
        with pytest.raises(GroupAbortedError, match="rank 0 has left .* by KeyboardInterrupt"):
            call(own, group, x)
    own.close()
    ctx.ccl.all_reduce(x, x)
    with iris.iris(1 << 20) as again:
        assert again.broadcast(ctx.cur_rank + 5) == 5
    ctx.barrier()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", MEETINGS)
def test_who_leaves_a_meeting_breaks_the_group(ranks, mistaken, name):
    ranks.run(left_in_a_meeting, name)
