"""Groups of the same ranks share segments: what each has is the same on all ranks, its own, zero, and given back."""

import gc
import os
import threading
import time

import pytest
import torch
import torch.distributed as dist

import iris.distributed  # noqa: F401 (registers the backend)
from iris.errors import HeapClosedError
from iris.heap.gpu import turn
from iris.heap.mapping import count_made, mappings
from iris.runtime.workspace import Workspace
from iris.world import Group


def two_groups(ctx, rounds):
    """Two groups of all ranks take memory at once, in threads that come in another order on each rank."""
    made = [dist.new_group() for _ in range(2)]
    workspaces = [Workspace(Group(group), ctx.device, ctx._record) for group in made]
    assert workspaces[0]._segments is workspaces[1]._segments
    failures, places, rank = [], [[], []], ctx.cur_rank

    def take(which):
        try:
            workspace = workspaces[which]
            for number in range(rounds):
                time.sleep(0.01 * ((which + number + rank) % 3))
                size = (9 << 20) + 1000 * number + 500 * which
                channel = workspace.channel(f"a test of {size} bytes", None, size, slice(0))
                if channel.memory[:: 1 << 12].any():
                    raise AssertionError(f"what group {which} takes is not zero")
                channel.memory.fill_(which + 1)
                at = channel.block.begin + channel.begin
                places[which].append((channel.block.mapping.name, at, size))
                gathered = workspace.group.all_gather(places[which][-1], "compare places")
                if len(set(gathered)) > 1:
                    raise AssertionError(f"group {which} has {gathered}")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=take, args=(which,)) for which in ((0, 1) if rank % 2 else (1, 0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    taken = sorted(place for of_group in places for place in of_group)
    for (name, begin, size), (other, after, _) in zip(taken, taken[1:], strict=False):
        assert name != other or begin + size <= after
    # What one group gives back another one of the same ranks takes, cleared, when all ranks have given it back.
    before = count_made()
    workspaces[0].close()
    ctx.barrier()
    size = places[0][0][2]
    channel = workspaces[1].channel("another test", None, size - 1024, slice(0))
    assert count_made() == before and not channel.memory.any()
    assert (channel.block.mapping.name, channel.block.begin) in {place[:2] for place in places[0]}
    workspaces[1].close()
    for group in made:
        dist.destroy_process_group(group)


@pytest.mark.ranks(2, 3)
def test_groups_of_the_same_ranks_at_once(ranks):
    ranks.run(two_groups, 4)


def take_turns(ctx, rounds):
    """Threads of two groups exchange handles, which a process can do once at a time; each rank begins with another."""
    groups = [Group(dist.new_group()) for _ in range(2)]
    inside, most, done, failures = [], [], [], []

    def exchange(group):
        try:
            for number in range(rounds):
                with turn(group):
                    inside.append(group.name)
                    most.append(len(inside))
                    group.all_gather(number, "an exchange")
                    time.sleep(1e-3 * (number % 3))
                    inside.remove(group.name)
                done.append(number)
        except BaseException as error:
            failures.append(error)

    order = groups if ctx.cur_rank % 2 else groups[::-1]
    threads = [threading.Thread(target=exchange, args=(group,)) for group in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert max(most) == 1 and sorted(done) == sorted([*range(rounds)] * 2)


@pytest.mark.ranks(2, 3)
def test_one_exchange_of_handles_at_a_time(ranks):
    ranks.run(take_turns, 20)


def leave_nothing(ctx, rounds):
    """Groups that are used, on the backend and by a context, and destroyed; those of the backend are still held."""
    x, destroyed = torch.ones(8, device=ctx.device), []

    def use(number):
        group = dist.new_group(backend=f"{ctx.device.type}:iris" if number % 2 else None)
        if number % 2:
            dist.all_reduce(x, group=group)
        else:
            ctx.ccl.all_reduce(x, x, group=group)
            ctx.device_barrier(group)
        dist.destroy_process_group(group)
        if number % 2:
            destroyed.append(group)
            with pytest.raises(HeapClosedError, match="was destroyed"):
                group.allreduce([x], dist.AllreduceOptions())

    def left():
        ctx.barrier()
        gc.collect()
        with open("/proc/self/maps") as maps:
            kinds = [line for line in maps if "memfd" in line or "nvidia" in line]
        return len(os.listdir("/proc/self/fd")), len(kinds), len(mappings()), len(ctx._groups), len(ctx._workspaces)

    for number in range(4):
        use(number)
    before = left()
    for number in range(rounds):
        use(number)
    assert left() == before


def test_destroyed_groups_leave_nothing(ranks):
    ranks.run(leave_nothing, 10)
