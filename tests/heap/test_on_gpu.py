"""What only a GPU has: streams that still use memory when it dies, and CUDA graphs that may use it at any time."""

import ctypes
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

import iris
from iris.errors import HeapOutOfMemoryError
from iris.heap.mapping import create
from iris.heap.pool import Pool

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there are no streams or graphs without a GPU")

KIB = 1024


def late_stream(ctx):
    """A heap of three blocks; the third allocation must wait for the kernel that still writes the dead first."""
    with iris.iris(3 * KIB) as small:
        side = torch.cuda.Stream()
        keep = small.zeros(2 * KIB, dtype=torch.uint8)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            doomed = small.empty(KIB, dtype=torch.uint8)
            address = doomed.data_ptr()
            torch.cuda._sleep(300_000_000)
            doomed.fill_(7)
            finished = torch.cuda.Event()
            finished.record()
            del doomed
        assert not finished.query()
        fresh = small.empty(KIB, dtype=torch.uint8)
        assert fresh.data_ptr() == address
        assert finished.query(), "memory was handed out while a kernel was still to write it"
        fresh.fill_(1)
        torch.cuda.synchronize()
        assert fresh.unique().tolist() == [1] and keep.unique().tolist() == [0]


def test_memory_is_not_reused_before_the_streams_that_used_it_are_done(ranks):
    ranks.run(late_stream)


def captured(ctx):
    with iris.iris(64 * KIB) as small:
        before = small.zeros(100, dtype=torch.int32)
        small.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            inside = small.empty(100, dtype=torch.int32)
            inside.copy_(before)
            inside.add_(1)
            address = inside.data_ptr()
            del inside
            del before
        count = small.heap.stats().count
        for _ in range(3):
            small.barrier()
        assert small.heap.stats().count == count == 2
        others = [small.full((100,), -1, dtype=torch.int32) for _ in range(20)]
        assert address not in [other.data_ptr() for other in others]
        graph.replay()
        small.barrier()
        assert all(other.unique().tolist() == [-1] for other in others)


def test_memory_of_a_graph_is_kept_until_the_context_is_closed(ranks):
    ranks.run(captured)


def full_in_capture(ctx):
    with iris.iris(8 * KIB) as small:
        tensor = small.zeros(KIB, dtype=torch.uint8)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tensor.add_(1)
            with pytest.raises(HeapOutOfMemoryError, match="capture"):
                small.empty(9 * KIB, dtype=torch.uint8)
        graph.replay()
        small.barrier()
        assert tensor.unique().tolist() == [1]


def test_a_heap_that_is_full_during_a_capture_says_so(ranks):
    ranks.run(full_in_capture)


def blocking_stream():
    """A stream for whose work the legacy default stream waits, as it does for none of torch's. Never destroyed."""
    handle = ctypes.c_void_p()
    torch.cuda.cudart().cudaStreamCreate(ctypes.addressof(handle))
    return torch.cuda.ExternalStream(handle.value)


def asked_during_a_capture(ctx, tie, by_another_thread):
    """A pool's only block is dead, and ``user`` is still to write it. Then a capture takes ``user`` in, or stops it.

    Meanwhile ``taker`` asks for memory, and once more after the capture.
    """
    room = 64 * KIB
    pool = Pool(ctx.device)
    pool.add(create(ctx._world.group, room, ctx.device))
    origin, user, taker = (torch.cuda.Stream() for _ in range(3))
    if tie == "the default stream's":
        origin, user = blocking_stream(), torch.cuda.default_stream()
    total = torch.zeros(4, device=ctx.device)
    for stream in (origin, user, taker):  # torch gets memory, and kernels are loaded: not in a capture
        with torch.cuda.stream(stream):
            torch.empty(room, dtype=torch.uint8, device=ctx.device).fill_(0)
            total.add_(0)
    torch.cuda.synchronize()
    with torch.cuda.stream(taker if tie == "recorded" else user):
        doomed = pool.empty(room, torch.uint8)
    address = doomed.data_ptr()
    with torch.cuda.stream(user):
        torch.cuda._sleep(1_000_000_000)
        doomed.fill_(7)
        finished = user.record_event()
    if tie == "recorded":
        pool.record_stream(doomed, user)
    del doomed
    graph = torch.cuda.CUDAGraph()

    def capture(meanwhile):
        with torch.cuda.stream(origin):
            graph.capture_begin()
            if user != torch.cuda.default_stream():
                user.wait_stream(origin)
                with torch.cuda.stream(user):
                    total.add_(1)
                origin.wait_stream(user)
            else:
                total.add_(1)
            meanwhile()
            graph.capture_end()

    def ask():
        with torch.cuda.stream(taker):
            fresh = pool.empty(room, torch.uint8)
            assert fresh.data_ptr() != address and not torch.cuda.is_current_stream_capturing()
            fresh.fill_(1)
            del fresh

    if by_another_thread:
        begun, asked = threading.Event(), threading.Event()
        with ThreadPoolExecutor(1) as other:
            captured = other.submit(capture, lambda: (begun.set(), asked.wait(60)))
            begun.wait(60)
            try:
                ask()
            finally:
                asked.set()
            captured.result()
    else:
        capture(ask)
    with torch.cuda.stream(taker):
        again = pool.empty(room, torch.uint8)
        assert again.data_ptr() == address and not finished.query()
        again.fill_(1)
    torch.cuda.synchronize()
    assert again.unique().tolist() == [1]
    graph.replay()
    assert total.tolist() == [1.0] * 4


@pytest.mark.parametrize(
    "tie, by_another_thread",
    [("taken", False), ("taken", True), ("recorded", False), ("recorded", True), ("the default stream's", False)],
)
def test_memory_of_a_stream_in_a_capture_waits_for_its_end(ranks, tie, by_another_thread):
    ranks.run(asked_during_a_capture, tie, by_another_thread)


def meeting_during_a_capture(ctx):
    """Ranks meet while a thread of each captures on a stream that a dead tensor of the heap was used on."""
    with iris.iris(64 * KIB) as small:
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        total = small.zeros(4)
        with torch.cuda.stream(side):
            doomed = small.zeros(4)
            total.add_(doomed)
        small.barrier()
        begun, met = threading.Event(), threading.Event()

        def capture():
            # So that the other thread may wait for its stream.
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                total.add_(1)
                begun.set()
                met.wait(60)

        with ThreadPoolExecutor(1) as other:
            captured = other.submit(capture)
            begun.wait(60)
            try:
                del doomed
                small.barrier(stream=torch.cuda.Stream())
                during = small.heap.stats().count
            finally:
                met.set()
            captured.result()
        small.barrier()
        assert (during, small.heap.stats().count) == (2, 1)
        graph.replay()
        assert total.tolist() == [1.0] * 4


def test_memory_of_the_heap_waits_for_the_end_of_a_capture(ranks):
    ranks.run(meeting_during_a_capture)


def too_large(ctx):
    begin = time.monotonic()
    with pytest.raises(MemoryError, match="larger than the memory"):
        iris.iris(1 << 45)
    free, total = torch.cuda.mem_get_info()
    with pytest.raises(MemoryError, match="no room"):
        iris.iris(total - (1 << 20))
    assert time.monotonic() - begin < 20
    # Nothing of it is left, and the next one works. What CUDA needs for kernels comes and goes beside it, on each rank.
    ranks_of_this_gpu = -(-ctx.num_ranks // torch.cuda.device_count())
    with iris.iris(1 << 20) as small:
        assert small.zeros(10).sum().item() == 0
    assert torch.cuda.mem_get_info()[0] > free - total // 16 * ranks_of_this_gpu


def test_a_heap_that_does_not_fit_is_an_error_on_every_rank_and_leaves_nothing(ranks):
    ranks.run(too_large)


def large_objects(ctx, size):
    """Stores to the end of a tensor past 2 and 4 GiB of the heap, and past these distances within it."""
    with iris.iris(size + (1 << 21)) as large:
        tensor = large.empty(size, dtype=torch.uint8)
        tensor[-256:] = large.cur_rank
        large.barrier()
        peer = (large.cur_rank + 1) % large.num_ranks
        large.peer(tensor, peer)[-128:] = torch.arange(128, device=large.device, dtype=torch.uint8) + large.cur_rank
        large.barrier()
        previous = (large.cur_rank - 1) % large.num_ranks
        assert tensor[-128:].tolist() == [previous + i for i in range(128)]
        assert tensor[-256:-128].unique().tolist() == [large.cur_rank]


@pytest.mark.parametrize("size", [(1 << 31) + 4096, (1 << 32) + 4096])
def test_large_tensors(ranks, size):
    ranks.run(large_objects, size)


def heaps_of_some_and_of_all(ctx):
    """Ranks that have shared memory in different numbers of groups share it with each other all the same."""
    for members in ([0], [ctx.num_ranks - 2, ctx.num_ranks - 1], list(range(ctx.num_ranks))):
        group = dist.new_group(members)
        if ctx.cur_rank in members:
            total = torch.ones(5, device=ctx.device)
            ctx.ccl.all_reduce(total, total, group=group)
            assert total.tolist() == [len(members)] * 5
    with iris.iris(64 * KIB) as own:
        own.device_barrier()
        own.barrier()


def test_groups_of_some_ranks_and_of_all(ranks):
    ranks.run(heaps_of_some_and_of_all)
