"""Memory comes back when every rank, and every kernel, is done with it."""

import contextlib
import gc
import os
import resource
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from iris import world
from iris.errors import HeapOutOfMemoryError
from iris.heap import SymmetricHeap, reclamation
from iris.world import Group

KIB = 1024

# Under the sanitizer there are gaps between allocations: heaps are larger, and what fills them is not what fills these.
pytestmark = pytest.mark.usefixtures("mistaken")


def lone_heap(size=64 * KIB):
    """A heap of one rank, whose deaths need no one's agreement."""
    return SymmetricHeap(Group(None), size, world.choose_device())


def shared_heap(ctx, size=64 * KIB):
    """A heap of all ranks that only this test uses."""
    return SymmetricHeap(Group(dist.group.WORLD), size, ctx.heap.device)


def test_memory_is_reused_in_a_loop_without_a_barrier():
    heap = lone_heap()
    for turn in range(5000):
        tensor = heap.empty((256 * (turn % 7),), torch.float32)
        tensor.fill_(turn)
    assert heap.stats().peak <= heap.size
    assert heap.stats().count <= 64


def test_a_million_allocations_leave_no_more_behind_than_ten():
    heap = lone_heap()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for turn in range(1_000_000 if os.environ.get("IRIS_TEST_ALL") == "1" else 20_000):
        assert heap.empty((turn % 900,), torch.float32).numel() == turn % 900
    heap.meet()
    assert heap.stats().count == 0 and heap.stats().largest_free_block == heap.size
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8 * KIB  # KiB: 8 MiB


def test_a_death_alone_frees_nothing_until_the_ranks_meet():
    heap = lone_heap()
    first = heap.empty((1,), torch.float32)
    offset = heap.offset(first)
    del first
    second = heap.empty((1,), torch.float32)
    assert heap.offset(second) != offset
    heap.meet()
    assert heap.offset(heap.empty((1,), torch.float32)) == offset


def test_a_full_heap_says_how_much_of_what():
    heap = lone_heap(16 * KIB)
    kept = [heap.empty((4 * KIB,), torch.int8) for _ in range(4)]
    del kept[1]
    with pytest.raises(HeapOutOfMemoryError) as caught:
        heap.empty((5000,), torch.int8)
    assert str(caught.value).startswith(
        "Heap out of memory: 4.883 KiB (5000 bytes) asked for, 4 KiB free, the largest free block is 4 KiB, "
        "of a heap of 16 KiB."
    )
    assert isinstance(caught.value, MemoryError)
    # Nothing was lost by trying.
    assert heap.offset(heap.empty((4096,), torch.int8)) == 4096


def test_a_full_heap_finds_what_only_the_garbage_collector_can():
    heap = lone_heap(8 * KIB)
    gc.disable()
    try:
        cycle = [heap.empty((8 * KIB,), torch.int8)]
        cycle.append(cycle)
        del cycle
        assert heap.offset(heap.empty((8 * KIB,), torch.int8)) == 0
    finally:
        gc.enable()


def hold_on_to_garbage(ctx):
    """Rank 0's tensors die in cycles that nobody collects, the others' at once."""
    heap = shared_heap(ctx)
    rank = heap.group.rank
    gc.collect()
    gc.disable()
    offsets = []
    try:
        for turn in range(150):
            tensor = heap.empty((256 * (1 + turn % 5),), torch.float32)
            tensor.fill_(turn + 1000 * rank)
            offsets.append(heap.offset(tensor))
            if rank == 0:
                cycle = [tensor]
                cycle.append(cycle)
                del cycle
            if turn % 25 == 24:
                heap.meet()
    finally:
        gc.enable()
    return offsets


@pytest.mark.ranks(3)
def test_a_rank_whose_collector_is_late_does_not_diverge(ranks):
    offsets = ranks.run(hold_on_to_garbage)
    assert len(set(map(str, offsets))) == 1
    assert len(set(offsets[0])) <= 64


def hold_on_for_good(ctx):
    heap = shared_heap(ctx, 16 * KIB)
    tensors = [heap.empty((4 * KIB,), torch.int8) for _ in range(4)]
    if heap.group.rank != 1:
        tensors.clear()
    with pytest.raises(HeapOutOfMemoryError) as caught:
        heap.empty((4 * KIB,), torch.int8)
    assert "16 KiB are dead on other ranks, and rank 1 still holds on to them." in str(caught.value)
    tensors.clear()
    return heap.offset(heap.empty((4 * KIB,), torch.int8))


@pytest.mark.ranks(3)
def test_a_full_heap_names_the_rank_that_holds_on(ranks):
    assert ranks.run(hold_on_for_good) == [0] * ranks.num_ranks


class FakeStream:
    """A stream whose work, or whose capture into a CUDA graph, ends when the test says. It is its own event, too."""

    def __init__(self):
        self.cuda_stream = id(self)
        self.done = self.captured = False

    def query(self):
        assert not self.captured, "the capture becomes invalid"
        return self.done

    def record_event(self):
        return self


@contextlib.contextmanager
def stream_of(heap):
    """A `FakeStream` that the heap's tensors may be used on."""
    stream = FakeStream()
    heap.record_stream(stream)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("iris.cuda_graphs.capture.is_capturing", lambda handle: stream.captured)
        yield stream


def wait_for_a_peers_kernel(ctx):
    """The kernel of rank 1 goes on using a dead tensor for three polls of the full heap."""
    heap = shared_heap(ctx, 4 * KIB)
    polls = []
    with stream_of(heap) as stream, pytest.MonkeyPatch.context() as patch:
        stream.done = heap.group.rank == 0

        def sleep(_):
            polls.append(heap.stats().count)
            stream.done |= len(polls) == 3

        heap.empty((4 * KIB,), torch.int8)
        heap.meet()
        assert heap.stats().count == 1, "memory came back while a kernel was using it"
        patch.setattr(reclamation, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
        heap.empty((4 * KIB,), torch.int8)
    return polls


@pytest.mark.ranks(2, exactly=True)
def test_memory_comes_back_when_the_last_kernel_has_finished(ranks):
    assert ranks.run(wait_for_a_peers_kernel) == [[1, 1, 1], [1, 1, 1]]


def wait_in_vain(ctx):
    heap = shared_heap(ctx, 4 * KIB)
    heap.group.timeout = 3.0  # in which a busy machine lets both ranks come
    with stream_of(heap) as stream:
        stream.done = heap.group.rank == 0
        heap.empty((4 * KIB,), torch.int8)
        with pytest.raises(TimeoutError, match=r"Kernels on rank 1, or .* have kept freed memory in use for 3 s"):
            heap.empty((4 * KIB,), torch.int8)


@pytest.mark.ranks(2, exactly=True)
def test_a_kernel_that_never_ends_is_named(ranks):
    ranks.run(wait_in_vain)


def test_memory_waits_for_the_end_of_a_capture_by_another_thread():
    heap = lone_heap()
    with stream_of(heap) as stream:
        heap.empty((100,), torch.int8)
        counts = []
        for stream.captured, stream.done in ((True, True), (False, False), (False, True)):
            heap.meet()
            counts.append(heap.stats().count)
    assert counts == [1, 1, 0]


def test_memory_of_a_graph_capture_is_kept(monkeypatch):
    heap = lone_heap(4 * KIB)
    before = heap.empty((1,), torch.int8)
    capturing = [True]
    monkeypatch.setattr(heap._lifetimes, "capturing", lambda: capturing[0])
    monkeypatch.setattr(heap._lifetimes, "_has_streams", True)
    monkeypatch.setattr(heap._lifetimes, "see_current_stream", lambda: None)
    within = heap.empty((1,), torch.int8)
    freed = heap.empty((1,), torch.int8)
    with pytest.raises(HeapOutOfMemoryError, match="during the capture of a CUDA graph"):
        heap.empty((4 * KIB,), torch.int8)
    heap.free(freed)
    capturing[0] = False
    del before, within, freed
    heap.meet()
    assert heap.stats().count == 2
    with pytest.raises(HeapOutOfMemoryError, match="2 bytes are kept for CUDA graphs"):
        heap.empty((4 * KIB,), torch.int8)
