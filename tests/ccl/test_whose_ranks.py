"""Whose ranks a call names: those of the world, of which a context or a group may have some."""

import pytest
import torch
import torch.distributed as dist

from iris.errors import InvalidGroupError, UnknownChoiceError


def without_this_rank(ctx):
    others = dist.new_group([0])
    if ctx.cur_rank != 0:
        with pytest.raises(InvalidGroupError, match="not a member of the group"):
            ctx.ccl.all_reduce(ctx.zeros(1), ctx.zeros(1), group=others)
    else:
        ctx.zeros(1), ctx.zeros(1)  # as on the other
        with pytest.raises(UnknownChoiceError, match=r"src=1.*0"):
            ctx.ccl.broadcast(torch.zeros(1, device=ctx.device), 1, group=others)


@pytest.mark.ranks(2, exactly=True)
def test_a_group_without_this_rank_and_a_root_outside_the_group(ranks):
    ranks.run(without_this_rank)


def in_a_context_of_some(ctx):
    """Ranks are those of the world, and a group with others is refused before anyone waits for these."""
    import iris

    members, others = dist.new_group([1, 2]), dist.new_group([0, 1])
    if ctx.cur_rank == 0:
        return
    with iris.iris(1 << 20, process_group=members) as own:
        x = torch.arange(3.0, device=own.device) + 10 * own.cur_rank
        own.ccl.broadcast(x, 2)
        assert x.tolist() == [10.0, 11.0, 12.0]
        for src in (0, 3, -1):
            with pytest.raises(UnknownChoiceError, match=f"src={src} is not possible; it takes one of 1, 2"):
                own.ccl.broadcast(x, src)
        if ctx.cur_rank == 1:
            with pytest.raises(InvalidGroupError, match="has rank 0, and this context has ranks 1 and"):
                own.ccl.all_reduce(x, x, group=others)
        own.ccl.all_reduce(x, x, group=members)
        assert x.tolist() == [20.0, 22.0, 24.0]


@pytest.mark.usefixtures("mistaken")
@pytest.mark.ranks(3, exactly=True)
def test_a_context_of_some_ranks(ranks):
    ranks.run(in_a_context_of_some)


def by_its_name(ctx):
    """torch's default group stands for all ranks, also where its memory is made before it is used."""
    import iris

    with iris.iris(1 << 20) as own:
        assert own.ccl.communicator(dist.group.WORLD) is own.ccl.communicator()


def test_the_default_group_is_that_of_all_ranks(ranks):
    ranks.run(by_its_name)
