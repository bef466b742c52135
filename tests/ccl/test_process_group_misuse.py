"""What the backend of torch.distributed refuses: the error says what was wrong, and nobody waits for ever."""

import contextlib

import pytest
import torch
import torch.distributed as dist

import iris.distributed  # noqa: F401 (registers the backend)
from ccl.test_process_group import make_group
from iris.errors import GroupAbortedError, InvalidCollectiveError, UnsupportedReductionError

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def refused(ctx):
    group, x = make_group(ctx), torch.zeros(4, device=ctx.device)
    with pytest.raises(UnsupportedReductionError, match="no ReduceOp.BXOR: it has SUM, AVG.*all_gather"):
        dist.all_reduce(x, dist.ReduceOp.BXOR, group=group)
    with pytest.raises(InvalidCollectiveError, match="give recv.. a src"):
        dist.recv(x, group=group)
    dist.all_reduce(x, group=group)
    dist.destroy_process_group(group)


def test_what_the_backend_does_not_have(ranks):
    ranks.run(refused)


def unequal_list(ctx, name):
    """The root's list has the right sum, but its first tensor an element less, and its last one more."""
    group, size, x = make_group(ctx), ctx.num_ranks, torch.full((3,), 1.0, device=ctx.device)
    parts = [x.new_full((3 - (rank == 0) + (rank == size - 1),), 10.0 + rank) for rank in range(size)]
    root = dist.get_global_rank(group, 0)
    call = {
        "scatter": lambda: dist.scatter(x, parts if ctx.cur_rank == root else None, root, group=group),
        "gather": lambda: dist.gather(x, parts if ctx.cur_rank == root else None, root, group=group),
    }[name]
    if ctx.cur_rank == root:
        with pytest.raises(InvalidCollectiveError, match=r"the list has tensors of \[2, .*4\]"):
            call()
    else:
        call()
    dist.barrier()
    with pytest.raises(GroupAbortedError, match=f"rank {root} is the root of {name}.., and refused it"):
        dist.all_reduce(x, group=group)
    dist.destroy_process_group(group)


def too_few_tensors(ctx):
    """Lists have a tensor for each rank. A rank whose part has not the size that its list says refuses it for all."""
    group, size, me = make_group(ctx), ctx.num_ranks, ctx.cur_rank
    x, result = torch.full((4,), 1.0 + me, device=ctx.device), torch.zeros(4, device=ctx.device)
    calls = {
        "all_gather": lambda several: dist.all_gather(several, x, group=group),
        "reduce_scatter": lambda several: dist.reduce_scatter(result, several, group=group),
        "all_to_all": lambda several: dist.all_to_all(several, several, group=group),
        "all_gather_coalesced": lambda several: dist.all_gather_coalesced([[y] for y in several], [x], group=group),
    }
    for name, call in calls.items():
        for count in (size - 1, size + 1):
            with pytest.raises(InvalidCollectiveError, match=rf"{name}\(\) among {size} ranks takes .* has {count}"):
                call([torch.zeros(4, device=ctx.device) for _ in range(count)])
    with pytest.raises(InvalidCollectiveError, match=r"alltoall\(\) of torch.distributed was given lists without a"):
        dist.all_to_all([], [], group=group)
    with pytest.raises(InvalidCollectiveError, match=r"all_reduce\(\) takes tensors .*sparse_coo"):
        dist.all_reduce(x.to_sparse(), group=group)
    with pytest.raises(InvalidCollectiveError, match=r"all_reduce\(\) takes tensors .*transform of torch.func"):
        torch.func.vmap(lambda each: (dist.all_reduce(each, group=group), each)[1])(x.view(2, 2))
    # Of any shapes.
    parts = [torch.zeros(2, 3 + rank, device=ctx.device) for rank in range(size)]
    dist.all_gather(parts, torch.full((2 * (3 + me),), 5.0 + me, device=ctx.device), group=group)
    assert [part.unique().tolist() for part in parts] == [[5.0 + rank] for rank in range(size)]
    if me == 0:
        with pytest.raises(InvalidCollectiveError, match="brings 1 elements of rank 0, and the list .* has 6 in their"):
            dist.all_gather(parts, x[:1], group=group)
    else:
        with contextlib.suppress(GroupAbortedError):  # which a rank may learn in this call, or later
            dist.all_gather(parts, torch.zeros_like(parts[me]), group=group)
    dist.barrier()
    with pytest.raises(GroupAbortedError, match="rank 0 is the root of broadcast"):
        dist.all_reduce(x, group=group)
    dist.destroy_process_group(group)


def test_lists_of_other_lengths_are_refused(ranks):
    ranks.run(too_few_tensors)


@pytest.mark.parametrize("name", ["scatter", "gather"])
def test_a_roots_list_of_unequal_tensors_is_refused(ranks, name):
    ranks.run(unequal_list, name)


def wrong_splits(ctx):
    group, size = make_group(ctx), ctx.num_ranks
    x, y = (torch.full((2 * size, 3), 1.0, device=ctx.device) for _ in range(2))
    with pytest.raises(InvalidCollectiveError, match=f"rows of its input to {size} ranks: {2 * size - 1} cannot be"):
        dist.all_to_all_single(y, x[1:], group=group)
    for splits in ([1] * size, [2] * (size - 1), [2] * size + [0]):
        with pytest.raises(InvalidCollectiveError, match=f"should be {size} numbers, .* which add up to {2 * size}"):
            dist.all_to_all_single(y, x, splits, [2] * size, group=group)
    dist.all_to_all_single(y, x + ctx.cur_rank, [2] * size, [2] * size, group=group)
    assert y[:, 0].tolist() == [1.0 + rank for rank in range(size) for _ in range(2)]
    dist.destroy_process_group(group)


def test_splits_that_do_not_fit_the_rows_are_refused(ranks):
    ranks.run(wrong_splits)
