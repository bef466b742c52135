"""Memory that every rank can address."""

import errno
import gc
import os
import stat
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from iris.compat import symmetric_memory
from iris.compat.symmetric_memory import CountingStore
from iris.errors import (
    HeapClosedError,
    HeapTooLargeError,
    InvalidHeapSizeError,
    IrisError,
    MappingError,
    MismatchedHeapError,
    PeerFailedError,
    RankOutOfRangeError,
    names,
)
from iris.heap import gpu, host, mapping
from iris.world import Group

SIZE = 1 << 16


def everyone():
    return Group(dist.group.WORLD)


def mapped_heaps():
    """Lines of this process's memory map that are a host heap's."""
    with open("/proc/self/maps") as maps:
        return sum("iris-heap" in line for line in maps)


def exchange_bytes(ctx):
    group = everyone()
    shared = mapping.create(group, SIZE, ctx.heap.device)
    pattern = torch.arange(SIZE, device=ctx.heap.device).mul_(group.rank + 3)
    shared.buffer.copy_(pattern.to(torch.uint8))
    ctx.barrier()
    for peer in range(group.size):
        expected = torch.arange(SIZE, device=ctx.heap.device).mul_(peer + 3).to(torch.uint8)
        assert torch.equal(shared.peer(peer), expected)
    ctx.barrier()
    for peer in range(group.size):
        # Each rank writes a word of its own into each heap.
        shared.peer(peer)[group.rank] = 100 + 10 * group.rank + peer
    ctx.barrier()
    assert shared.buffer[: group.size].tolist() == [100 + 10 * rank + group.rank for rank in range(group.size)]
    assert len({base % mapping.CONGRUENCE for base in shared.bases}) == 1
    ctx.barrier()
    shared.close()
    with pytest.raises(HeapClosedError):
        shared.peer(0)


@pytest.mark.ranks(1, 2, 3)
def test_every_rank_addresses_every_ranks_bytes(ranks):
    ranks.run(exchange_bytes)


def look_at_nobody(ctx):
    shared = mapping.create(everyone(), SIZE, ctx.heap.device)
    for wrong in (-1, ctx.num_ranks):
        with pytest.raises(RankOutOfRangeError):
            shared.peer(wrong)
    ctx.barrier()
    shared.close()


@pytest.mark.usefixtures("mistaken")
def test_bytes_of_no_rank_are_told(ranks):
    ranks.run(look_at_nobody)


def outlive(ctx):
    gc.collect()
    before = mapped_heaps()
    shared = mapping.create(everyone(), SIZE, torch.device("cpu"))
    tail = shared.peer((dist.get_rank() + 1) % dist.get_world_size())[SIZE - 3 :]
    tail.fill_(7)
    shared.close()
    assert mapped_heaps() == before + dist.get_world_size()
    assert tail.tolist() == [7, 7, 7]
    del tail
    assert mapped_heaps() == before


@pytest.mark.ranks(2)
def test_memory_is_mapped_until_its_last_tensor_is_gone(ranks):
    ranks.run(outlive)


def fail_on_last(ctx, step):
    """The last rank cannot do a step of the provider; every rank must be left as it was."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    gc.collect()  # what other tests have left must not go while this one counts
    files, maps = len(os.listdir("/proc/self/fd")), mapped_heaps()

    def refuse(*_):
        raise OSError("refused by the test")

    with pytest.MonkeyPatch.context() as patch:
        if rank == last:
            patch.setattr(*{"make": (os, "memfd_create"), "map": (host.mmap, "mmap")}[step], refuse)
        with pytest.raises(MappingError if rank == last else PeerFailedError, match="refused by the test") as caught:
            mapping.create(everyone(), SIZE, torch.device("cpu"))
    if rank != last:
        assert f"rank {last} could not" in str(caught.value)
    del caught
    assert (len(os.listdir("/proc/self/fd")), mapped_heaps()) == (files, maps)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("step", ["make", "map"])
def test_a_failure_on_one_rank_undoes_the_mapping_on_all(ranks, step):
    ranks.run(fail_on_last, step)


def run_out_of_files(ctx, step):
    def refuse(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*{"make": (os, "memfd_create"), "map": (host.mmap, "mmap")}[step], refuse)
        with pytest.raises(MappingError, match=r"Too many open files\. This process may not .* \(ulimit -n\)"):
            mapping.create(everyone(), SIZE, torch.device("cpu"))
    everyone().all_gather(None, "the end of the test")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("step", ["make", "map"])
def test_that_there_may_be_no_more_files_is_told(ranks, step):
    ranks.run(run_out_of_files, step)


def disagree(ctx):
    with pytest.raises(MismatchedHeapError, match="64 KiB on rank 0, 128 KiB on rank 1"):
        mapping.create(everyone(), SIZE << dist.get_rank(), ctx.heap.device)
    with pytest.raises(MismatchedHeapError, match=r"\(65537 bytes\) on rank 0, .*\(65538 bytes\) on rank 1"):
        mapping.create(everyone(), SIZE + 1 + dist.get_rank(), ctx.heap.device)


@pytest.mark.ranks(2)
def test_sizes_that_differ_are_told(ranks):
    ranks.run(disagree)


def ask_for_nonsense(ctx, size):
    rank = dist.get_rank()
    error = InvalidHeapSizeError if rank == 1 else PeerFailedError
    with pytest.raises(error, match=f"heap_size={size!r} is not possible"):
        mapping.create(everyone(), size if rank == 1 else SIZE, ctx.heap.device)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("size", [-1, "1G", 1e6])
def test_a_size_that_is_no_number_of_bytes_is_told(ranks, size):
    ranks.run(ask_for_nonsense, size)


def ask_too_much(ctx):
    rank = dist.get_rank()
    error = HeapTooLargeError if rank == 1 else PeerFailedError
    with pytest.raises(error, match=r"A heap of 8192 TiB is larger than the memory of"):
        mapping.create(everyone(), 1 << 53 if rank == 1 else SIZE, ctx.heap.device)


@pytest.mark.ranks(2)
def test_a_heap_larger_than_the_device_is_told(ranks):
    ranks.run(ask_too_much)


def test_a_large_heap_costs_nothing_until_it_is_used():
    size = min(host.total_memory(torch.device("cpu")), 1 << 36)
    shared = mapping.create(Group(None), size, torch.device("cpu"))
    shared.buffer[size - 1] = 5
    assert shared.buffer[size - 1] == 5 and shared.buffer[size // 2] == 0
    with open("/proc/self/smaps_rollup") as rollup:
        (shared_kib,) = [int(line.split()[1]) for line in rollup if line.startswith("Pss_Shmem")]
    assert shared_kib < 1 << 20


def test_only_the_owner_may_open_a_heap(monkeypatch):
    modes = []
    truncate = os.ftruncate

    def look(file, size):
        modes.append(stat.S_IMODE(os.fstat(file).st_mode))
        truncate(file, size)

    monkeypatch.setattr(os, "ftruncate", look)
    mapping.create(Group(None), SIZE, torch.device("cpu"))
    assert modes == [0o600]


VICTIM = """
import torch
from iris.heap import mapping
from iris.world import Group
shared = mapping.create(Group(None), 1 << 24, torch.device("cpu"))
shared.buffer.fill_(1)
print(*(line.split()[4] for line in open("/proc/self/maps") if "iris-heap" in line), flush=True)
input()
"""


def mapped_somewhere(inode):
    """Whether any process that we may look at maps the heap with this inode."""
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{process}/maps") as maps:
                if any("iris-heap" in line and line.split()[4] == inode for line in maps):
                    return True
        except OSError:
            continue
    return False


def test_a_killed_rank_leaves_nothing_behind():
    """No file anywhere has the heap's name, and no process its memory, so the kernel has taken it back."""
    process = subprocess.Popen([sys.executable, "-c", VICTIM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    inode = process.stdout.readline().strip()
    assert mapped_somewhere(inode)
    process.kill()
    process.communicate()
    assert not mapped_somewhere(inode)
    assert not [name for name in os.listdir("/dev/shm") if "iris" in name]


def test_what_torch_cannot_share_is_told(monkeypatch):
    """The error of a GPU machine whose processes cannot exchange memory, without the GPUs."""
    monkeypatch.setattr(symmetric_memory, "allocate", lambda *_: torch.empty(SIZE))
    monkeypatch.setattr(gpu, "keep", lambda make, device: make())

    def refuse(*_):
        assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
        raise RuntimeError("cuMemImportFromShareableHandle failed\nstack trace")

    monkeypatch.setattr(symmetric_memory, "rendezvous", refuse)
    monkeypatch.delenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", raising=False)
    with pytest.raises(MappingError, match=r"cuMemImportFromShareableHandle failed\. Are all GPUs connected"):
        gpu.share(PairOfRanks(), SIZE, torch.device("cuda:0"))
    assert "TORCH_SYMM_MEM_DISABLE_MULTICAST" not in os.environ


class PairOfRanks:
    """A group whose other member always agrees."""

    rank, size, ranks, name, meetings = 0, 2, (0, 1), "0/iris/0", 0

    def __init__(self):
        self.store = dist.HashStore()

    def agree(self, step, what):
        return [step(), None]

    def all_gather(self, value, what):
        return [value, value]


def test_a_gpu_without_room_is_told(monkeypatch):
    def refuse(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate …\nmore")

    monkeypatch.setattr(symmetric_memory, "allocate", refuse)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 8 << 30))
    with pytest.raises(HeapTooLargeError, match="no room for a heap of 2 GiB: 1 GiB of 8 GiB are free"):
        gpu.share(PairOfRanks(), 2 << 30, torch.device("cuda:0"))


def test_every_error_is_one_of_iris():
    assert issubclass(PeerFailedError, IrisError) and issubclass(PeerFailedError, RuntimeError)
    assert issubclass(HeapTooLargeError, MemoryError) and issubclass(MismatchedHeapError, ValueError)
    assert names([0, 2, 3]) == "ranks 0, 2 and 3" and names([4]) == "rank 4"


def test_exchanges_meet_whatever_numbers_the_ranks_have_come_to():
    store = dist.HashStore()
    here, there = CountingStore(store), CountingStore(store)
    for number in range(3):
        for ends, first, rank in ((here, 6, 0), (there, 40, 1)):
            ends.set(f"exchange/{first + number}/{rank}", f"{number} from {rank}")
        here.wait([f"exchange/{6 + number}/1"])
        assert here.get(f"exchange/{6 + number}/1") == f"{number} from 1".encode()
        there.wait([f"exchange/{40 + number}/0"])
        assert there.get(f"exchange/{40 + number}/0") == f"{number} from 0".encode()
