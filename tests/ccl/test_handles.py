"""What a call gives beside its result: a handle, a workspace for later calls, and word to autograd."""

from functools import partial

import pytest
import torch

from iris.errors import WorkspaceTooSmallError


def prepared(ctx):
    """Calls that share a workspace, of the size it was made for and smaller."""
    given, result = ctx.full((5000,), ctx.cur_rank + 1.0), ctx.empty(5000)
    workspace = ctx.ccl.all_reduce_preamble(result, given)
    assert ctx.ccl.all_reduce_preamble(result[:100], given[:100], workspace=workspace) is workspace
    for count in (5000, 17):
        assert ctx.ccl.all_reduce(result[:count], given[:count], workspace=workspace) is None
        assert result[:count].unique().tolist() == [ctx.num_ranks * (ctx.num_ranks + 1) / 2]
    # Prepared without a group it is for any; for a group it is for that one alone.
    group = torch.distributed.new_group([ctx.num_ranks - 1])
    if ctx.cur_rank == ctx.num_ranks - 1:
        ctx.ccl.all_reduce(result, given, group=group, workspace=workspace)
        assert result.unique().tolist() == [ctx.num_ranks]
        of_group = ctx.ccl.all_reduce_preamble(result, given, group=group)
        ctx.ccl.all_reduce(result, given, group=group, workspace=of_group)
        if ctx.num_ranks > 1:
            with pytest.raises(WorkspaceTooSmallError, match=r"group of ranks .*; this all_reduce is of the group"):
                ctx.ccl.all_reduce(result, given, workspace=of_group)
    # One of the same ranks is another group.
    everyone = torch.distributed.new_group()
    of_everyone = ctx.ccl.all_reduce_preamble(result, given, group=everyone)
    with pytest.raises(WorkspaceTooSmallError, match="this all_reduce is of another group of the same ranks"):
        ctx.ccl.all_reduce(result, given, workspace=of_everyone)
    ctx.barrier()


def test_a_prepared_workspace(ranks):
    ranks.run(prepared)


def handles(ctx):
    result, peer = ctx.zeros(ctx.num_ranks), (ctx.cur_rank + 1) % ctx.num_ranks
    work = ctx.ccl.all_gather(result, torch.full((1,), float(ctx.cur_rank), device=ctx.device), async_op=True)
    assert work.wait() and result.tolist() == list(range(ctx.num_ranks))
    assert work.is_completed()
    result[0] = 10.0 + ctx.cur_rank
    assert ctx.ccl.barrier(async_op=True).wait()
    assert ctx.peer(result, peer)[0].item() == 10.0 + peer
    assert ctx.ccl.barrier() is None


@pytest.mark.ranks(1, 3)
def test_handles_and_the_barrier(ranks):
    ranks.run(handles)


def written(ctx):
    """Autograd learns of what is written, here or by peers, and of nothing else."""
    ccl, size, root = ctx.ccl, ctx.num_ranks, ctx.cur_rank == 0
    one, other, every, parts = (torch.ones(n * 4, device=ctx.device) for n in (1, 1, size, size))
    places = ([4] * size, [4 * r for r in range(size)])
    calls = {
        "all_gather": (every, one, True),
        "all_to_all": (every, parts, True),
        "gather": (every, one, root),
        "scatter": (one, every, True),
        "all_reduce": (other, one, True),
        "reduce_scatter": (one, every, True),
        "reduce": (other, one, root),
    }
    calls = [(partial(getattr(ccl, name), output, input), output, input, is_written)
             for name, (output, input, is_written) in calls.items()]  # fmt: skip
    calls += [
        (partial(ccl.all_to_all_v, every, parts, *places, *places), every, parts, True),
        (partial(ccl.broadcast, one), one, other, not root),
        (partial(ccl.send, one, 1) if root else partial(ccl.recv, one, 0), one, other, not root),
        (partial(ccl.all_reduce, one, one), one, other, True),
    ]
    for call, output, input, is_written in calls:
        versions = output._version, input._version
        call()
        assert (output._version > versions[0], input._version > versions[1]) == (is_written, False), call
    with torch.inference_mode():
        ccl.all_reduce(torch.empty(4, device=ctx.device), one)


@pytest.mark.ranks(2, exactly=True)
def test_autograd_learns_of_what_is_written(ranks):
    ranks.run(written)
