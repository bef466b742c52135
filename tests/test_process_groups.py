"""Process groups that calls of a context are given: those of its ranks, and what is refused."""

import pytest
import torch
import torch.distributed as dist

import iris
from iris.errors import InvalidGroupError


def call_whole_program(ctx):
    """From contexts of parts of it. The group of such a context is another word for all of its ranks."""
    parts = [[0], [*range(1, ctx.num_ranks)]]
    own = [dist.new_group(ranks) for ranks in parts][ctx.cur_rank > 0]
    members = parts[ctx.cur_rank > 0]
    with iris.iris(1 << 20, process_group=own) as part:
        values, elements = torch.empty(4, device=part.device), torch.arange(1.0, 5.0, device=part.device)
        for group, factor in ((None, 1), (own, 3)):
            part.ccl.all_reduce(values.copy_(elements * factor * 10**ctx.cur_rank), values, group=group)
            assert values.tolist() == [factor * k * sum(10**rank for rank in members) for k in (1, 2, 3, 4)]
            part.barrier(group=group)
            part.device_barrier(group)
        sizes = {"num_experts": ctx.num_ranks, "hidden": 64, "max_tokens": 4, "top_k": 1}
        for call in (
            lambda group: part.ccl.communicator(group),
            lambda group: part.ccl.all_reduce(values, values, group=group),
            lambda group: part.ccl.broadcast(values, src=0, group=group),
            lambda group: part.barrier(group=group),
            lambda group: part.device_barrier(group),
            lambda group: part.experts(**sizes, group=group),
        ):
            with pytest.raises(InvalidGroupError, match=r"The group has ranks? .*, and this context has .*iris\.iris"):
                call(dist.group.WORLD)


@pytest.mark.ranks(3)
def test_in_a_context_of_some_ranks_a_group_of_others_is_refused(ranks):
    ranks.run(call_whole_program)


def call_destroyed_group(ctx):
    gone = dist.new_group()
    ctx.device_barrier(gone)
    dist.destroy_process_group(gone)
    ctx.barrier()
    x = torch.ones(4, device=ctx.device)
    for call in (
        lambda: ctx.device_barrier(gone),
        lambda: ctx.barrier(group=gone),
        lambda: ctx.ccl.all_reduce(x, x, group=gone),
        lambda: iris.iris(1 << 20, process_group=gone),
    ):
        with pytest.raises(InvalidGroupError, match=r"was destroyed.*new_group\(\)"):
            call()


def test_a_group_that_was_destroyed_is_refused(ranks):
    ranks.run(call_destroyed_group)
