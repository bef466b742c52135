"""Windows of a process group: a rank puts into the tensors of others, and signals."""

import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import iris.distributed  # noqa: F401 (registers the backend)
from iris.errors import HeapClosedError, InvalidCollectiveError, InvalidCountError, NotATensorError

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

COUNT = 1000


def make_group(ctx):
    return dist.new_group(backend=f"{ctx.device.type}:iris")


def window_of(group, tensor):
    """As torch 2.14 makes it; older releases have no call for it."""
    make = getattr(dist.distributed_c10d, "_new_window", None)
    if make is None:
        return group.new_window(tensor)
    assert dist.distributed_c10d._supports_window(group)
    return make(tensor, group)


def values(ctx, rank, call):
    return (torch.arange(COUNT, device=ctx.device) + 5000 * rank + 100_000 * call).float()


def around(ctx, async_op):
    """Each rank puts into the next one's tensor, which takes it and says that there is room again."""
    group, size, rank = make_group(ctx), ctx.num_ranks, ctx.cur_rank
    after, before = (rank + 1) % size, (rank - 1) % size
    # At another place on each rank.
    kept = group.allocate_tensor(1 + 4096 * rank, dtype=torch.uint8, device=ctx.device)
    tensor = group.allocate_tensor(2 * COUNT, dtype=torch.float32, device=ctx.device)
    tensor.zero_()
    window = window_of(group, tensor)
    dist.barrier(group=group)
    for call in range(1, 7):
        half = COUNT * (call % 2)
        works = [window.put(values(ctx, rank, call), after, half, async_op), window.signal(after, async_op)]
        window.wait_signal(before, async_op).wait()
        assert torch.equal(tensor[half : half + COUNT], values(ctx, before, call))
        works += [window.signal(before, async_op), window.wait_signal(after, async_op)]
        for work in works:
            work.wait()
            assert ctx.device.type == "cuda" or work.is_completed()
    theirs = window.map_remote_tensor(before)
    assert theirs.shape == (2 * COUNT,) and window.map_remote_tensor(rank).data_ptr() == tensor.data_ptr()
    assert torch.equal(theirs[:COUNT], values(ctx, (before - 1) % size, 6))
    if hasattr(torch._C._distributed_c10d, "WindowAttr"):
        assert window.get_attr(after).access_type == torch._C._distributed_c10d.WindowAccessType.UNIFIED
    dist.barrier(group=group)
    # Streams are the window's, and end with it.
    assert set(group._streams) <= {"collectives"}
    window.tensor_deregister()
    with pytest.raises(InvalidCollectiveError, match="has no tensor"):
        window.put(kept, after, 0)
    window.tensor_register(tensor[COUNT:])
    assert torch.equal(window.map_remote_tensor(before), values(ctx, (before - 1) % size, 5))
    dist.barrier(group=group)
    dist.destroy_process_group(group)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("async_op", [False, True])
def test_puts_are_there_after_waits_for_their_signals(ranks, async_op):
    ranks.run(around, async_op)


def refused(ctx):
    group, rank = make_group(ctx), ctx.cur_rank
    tensor = group.allocate_tensor(COUNT, dtype=torch.float32, device=ctx.device)
    with pytest.raises(InvalidCollectiveError, match=r"rank 1 registered others.*make them anew"):
        group.new_window(torch.zeros_like(tensor) if rank else tensor)
    with mock.patch.object(group.memory(ctx.device), "grow", return_value=False):
        with pytest.raises(InvalidCollectiveError, match=r"rank 1 registered others.*no more of it"):
            group.new_window(torch.zeros_like(tensor) if rank else tensor)
    with pytest.raises(InvalidCollectiveError, match=r"the ranks register float32\[1000\], float32\[999\]"):
        group.new_window(tensor[rank:])
    window = group.new_window(tensor)
    with pytest.raises(InvalidCollectiveError, match="This window has a tensor"):
        window.tensor_register(tensor)
    with pytest.raises(InvalidCollectiveError, match="elements 999 to 1001 does not fit in a window of float32.1000."):
        window.put(tensor[:2], 0, 999)
    with pytest.raises(InvalidCollectiveError, match="put.. of int32.2. to elements 0 to 2"):
        window.put(tensor[:2].int(), 0, 0)
    for peer in (2, "1", None):
        with pytest.raises(InvalidCollectiveError, match=f"Rank {peer!r} of a window: its group has ranks 0 to 1"):
            window.signal(peer)
    with pytest.raises(InvalidCollectiveError, match="to element 1.0: that is a whole number"):
        window.put(tensor[:2], 0, 1.0)
    with pytest.raises(NotATensorError, match=r"put\(\) takes tensors, and this is a list"):
        window.put([1.0], 0, 0)
    for size in (-3, (2, 3), 1.0):
        with pytest.raises(InvalidCountError, match=re.escape(f"size={size!r} is not possible: it is a number of el")):
            group.allocate_tensor(size, dtype=torch.float32, device=ctx.device)
    dist.destroy_process_group(group)
    with pytest.raises(HeapClosedError, match="This process group was destroyed"):
        window.signal(1 - rank)


@pytest.mark.ranks(2)
def test_what_a_window_refuses(ranks):
    ranks.run(refused)


def alone(ctx):
    group = [dist.new_group([rank], backend=f"{ctx.device.type}:iris") for rank in range(ctx.num_ranks)][ctx.cur_rank]
    tensor = torch.zeros(COUNT, device=ctx.device)
    window = window_of(group, tensor)
    window.put(values(ctx, 0, 1)[:10], 0, 5)
    window.signal(0)
    window.wait_signal(0)
    assert torch.equal(tensor[5:15], values(ctx, 0, 1)[:10]) and not tensor[15:].any()
    dist.destroy_process_group(group)


@pytest.mark.ranks(2)
def test_a_window_of_one_rank(ranks):
    ranks.run(alone)
