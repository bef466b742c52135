"""A program whose ranks allocate differently is caught and named."""

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from iris.errors import AsymmetricHeapError, InvalidSettingError, OutOfStepError
from iris.heap import SymmetricHeap, history
from iris.heap.history import History
from iris.world import Group

KIB = 1024

pytestmark = pytest.mark.usefixtures("mistaken")


def shared_heap(ctx, size=64 * KIB):
    """A heap of all ranks that only this test uses."""
    return SymmetricHeap(Group(dist.group.WORLD), size, ctx.heap.device)


def make_one_more(ctx, debug, exhausted):
    """Rank 1 allocates once more than the others before they meet."""
    os.environ["IRIS_DEBUG"] = debug
    try:
        heap = shared_heap(ctx, 16 * KIB)
        ctx.heap, whole = heap, ctx.heap
        try:
            kept = [ctx.zeros(1024, dtype=torch.int8)]
            if heap.group.rank == 1:
                kept.append(ctx.ones(2, 3) if not exhausted else None)
            with pytest.raises(AsymmetricHeapError) as caught:
                if exhausted and heap.group.rank == 1:
                    ctx.empty(32 * KIB, dtype=torch.int8)
                ctx.heap.meet()
        finally:
            ctx.heap = whole
    finally:
        del os.environ["IRIS_DEBUG"]
    return str(caught.value)


@pytest.mark.ranks(3, exactly=True)
def test_an_asymmetric_program_is_caught(ranks):
    for text in ranks.run(make_one_more, "0", False):
        assert "ranks 0 and 2 made 1 allocation and are in barrier()" in text
        assert "rank 1 made 2 allocations and is in barrier()" in text
        assert "Set IRIS_DEBUG=1" in text


@pytest.mark.ranks(3, exactly=True)
def test_debug_mode_names_the_call_that_differs(ranks):
    line = make_one_more.__code__.co_firstlineno + 9
    for text in ranks.run(make_one_more, "1", False):
        assert "Allocation 2 is the first that differs" in text
        assert "no further allocation on ranks 0 and 2" in text
        assert f"ones() of float32[2, 3] at {os.path.relpath(__file__)}:{line} on rank 1" in text


@pytest.mark.ranks(2, exactly=True)
def test_a_rank_that_fills_its_heap_alone_is_caught(ranks):
    for text in ranks.run(make_one_more, "0", True):
        assert "rank 0 made 1 allocation and is in barrier()" in text
        assert "rank 1 made 2 allocations and is in an allocation of 32 KiB for which the heap is full" in text


def differ_in_size(ctx):
    heap = shared_heap(ctx)
    tensor = heap.empty((10 + heap.group.rank,), torch.int8)
    with pytest.raises(AsymmetricHeapError, match="The sizes or the offsets differ"):
        heap.meet()
    del tensor


@pytest.mark.ranks(2, exactly=True)
def test_different_sizes_are_caught(ranks):
    ranks.run(differ_in_size)


def cross_paths(ctx):
    heap = shared_heap(ctx)
    with pytest.raises(OutOfStepError, match="rank 0 in a broadcast; rank 1 in a barrier or allocation of the context"):
        heap.meet() if heap.group.rank else heap.group.all_gather(None, "a broadcast")


@pytest.mark.ranks(2, exactly=True)
def test_ranks_in_different_calls_are_told(ranks):
    ranks.run(cross_paths)


def debug_alone(ctx):
    if dist.get_rank() == 1:
        os.environ["IRIS_DEBUG"] = "1"
    try:
        heap = shared_heap(ctx)
        heap.empty((3,), torch.int8)
        heap.meet()
        heap.empty((3 + heap.group.rank,), torch.int8)
        with pytest.raises(AsymmetricHeapError, match="Set IRIS_DEBUG=1 on all ranks"):
            heap.meet()
    finally:
        os.environ.pop("IRIS_DEBUG", None)


@pytest.mark.ranks(2, exactly=True)
def test_debug_mode_on_one_rank_is_no_difference(ranks):
    ranks.run(debug_alone)


def test_a_debug_mode_that_means_nothing_is_refused(monkeypatch):
    monkeypatch.setenv("IRIS_DEBUG", "yes")
    with pytest.raises(InvalidSettingError, match="IRIS_DEBUG='yes' is not valid"):
        history.debugging()


def test_equal_allocations_at_different_offsets_are_a_difference():
    """Ranks that have taken back different blocks, say after a meeting that only some of them completed."""
    histories = [History(debug=False) for _ in range(2)]
    for offset, each in zip((0, 1024), histories, strict=True):
        each.add(16, (4,), torch.float32)
        each.add_offset(offset)
    group = SimpleNamespace(ranks=(0, 1))
    with pytest.raises(AsymmetricHeapError, match="The sizes or the offsets differ"):
        histories[0].compare(group, [each.summary("barrier()") for each in histories])
