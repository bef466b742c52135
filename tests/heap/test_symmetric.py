"""The symmetric heap: same offsets everywhere, and memory that comes back when every rank is done with it."""

import os
import weakref

import pytest
import torch
import torch.distributed as dist

from iris import world
from iris.errors import (
    FreedTensorError,
    HeapClosedError,
    InvalidDtypeError,
    InvalidShapeError,
    NotSymmetricError,
    RankOutOfRangeError,
)
from iris.heap import SymmetricHeap, describe_address
from iris.world import Group

KIB = 1024


def lone_heap(size=64 * KIB):
    """A heap of one rank, whose deaths need no one's agreement."""
    return SymmetricHeap(Group(None), size, world.choose_device())


def shared_heap(ctx, size=64 * KIB):
    """A heap of all ranks that only this test uses."""
    return SymmetricHeap(Group(dist.group.WORLD), size, ctx.heap.device)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.bfloat16, torch.float8_e4m3fn, torch.complex128])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 0, 2), (2, 3, 4)])
def test_a_tensor_is_a_contiguous_leaf_with_a_storage_of_its_own(shape, dtype):
    heap = lone_heap()
    tensors = [heap.empty(shape, dtype) for _ in range(3)]
    for index, tensor in enumerate(tensors):
        assert (tensor.shape, tensor.dtype, tensor.device) == (shape, dtype, heap.device)
        assert tensor.is_contiguous() and tensor.is_leaf and tensor.storage_offset() == 0
        assert heap.is_symmetric(tensor)
        assert heap.offset(tensor) == 1024 * index
        assert tensor.untyped_storage().nbytes() == tensor.numel() * dtype.itemsize
        assert tensor.untyped_storage().data_ptr() % 1024 == 0
        assert not tensor.untyped_storage().resizable()


def test_a_tensor_may_require_grad():
    heap = lone_heap()
    weight = heap.empty((3,), torch.float32, requires_grad=True)
    assert weight.is_leaf
    (weight * 2).sum().backward()
    assert weight.grad.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("shape", "dtype", "error", "text"),
    [
        ((2, -1), torch.float32, InvalidShapeError, r"\[2, -1\]"),
        ((2,), "float32", InvalidDtypeError, "'float32'"),
        ((2.5,), torch.float32, TypeError, "float"),
    ],
)
def test_what_no_tensor_can_have_is_refused(shape, dtype, error, text):
    with pytest.raises(error, match=text):
        lone_heap().empty(shape, dtype)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[3:],
        lambda t: t.view(torch.int16),
        lambda t: t.detach(),
        lambda t: t.untyped_storage(),
        lambda t: torch.nn.Parameter(t),
        lambda t: (t * 1.0 if t.requires_grad else t.requires_grad_()).expand(2, 8).transpose(0, 1),
    ],
)
def test_a_view_keeps_its_memory(view):
    heap = lone_heap()
    tensor = heap.empty((8,), torch.float32)
    kept = view(tensor)
    del tensor
    heap.meet()
    assert heap.stats().count == 1
    del kept
    heap.meet()
    assert heap.stats().count == 0


def test_an_explicit_free_counts_once():
    heap = lone_heap()
    tensor = heap.empty((4,), torch.float32)
    heap.free(tensor[1:])
    with pytest.raises(FreedTensorError, match=r"float32\[4\].* was freed before"):
        heap.free(tensor)
    heap.meet()
    assert heap.stats().count == 0
    other = heap.empty((4,), torch.float32)
    assert heap.offset(other) == heap.offset(tensor)
    # The same address, and still not the same tensor: neither freeing it nor its death touches the new one.
    with pytest.raises(FreedTensorError):
        heap.free(tensor)
    del tensor
    heap.meet()
    assert heap.stats().count == 1


def test_a_tensor_from_elsewhere_is_refused():
    heap, elsewhere = lone_heap(), torch.zeros(3)
    assert not heap.is_symmetric(elsewhere)
    for use in (heap.free, heap.offset, lambda t: heap.peer(t, 0)):
        with pytest.raises(NotSymmetricError, match=r"float32\[3\] on cpu"):
            use(elsewhere)
        with pytest.raises(NotSymmetricError):
            use(lone_heap().empty((3,), torch.float32))


def test_a_closed_heap_refuses_and_its_tensors_stay_valid():
    heap = lone_heap()
    tensor = heap.empty((4,), torch.float32).fill_(3)
    heap.close()
    for use in (
        lambda: heap.empty((1,), torch.float32),
        lambda: heap.free(tensor),
        lambda: heap.peer(tensor, 0),
        lambda: heap.is_symmetric(tensor),
        heap.stats,
        heap.meet,
    ):
        with pytest.raises(HeapClosedError, match="was closed"):
            use()
    heap.close()
    assert tensor.sum() == 12


def test_a_dropped_heap_leaves_its_tensors_valid_and_no_cycle_behind():
    heap = lone_heap()
    tensor = heap.empty((4,), torch.float32).fill_(3)
    gone = weakref.ref(heap)
    del heap
    assert gone() is None
    assert tensor.sum() == 12


def test_an_address_is_described(monkeypatch):
    heap = lone_heap()
    tensor = heap.empty((4, 8), torch.float32)
    start = tensor.data_ptr()
    assert describe_address(start + 28) == "rank 0's float32[4, 8], element 7 (offset 0x1c)"
    assert describe_address(start + 130) == "rank 0's float32[4, 8], 2 bytes past its end (offset 0x82)"
    assert describe_address(start + 4096) == "rank 0's heap at offset 0x1000, where no tensor is"
    assert describe_address(start - 1) is None
    monkeypatch.setenv("IRIS_DEBUG", "1")
    heap = lone_heap()
    tensor = heap.empty((2,), torch.int64)
    place = f"{os.path.relpath(__file__)}:{test_an_address_is_described.__code__.co_firstlineno + 10}"
    expected = f"rank 0's int64[2] made by empty() at {place}, element 1 (offset 0x8)"
    assert describe_address(tensor[1].data_ptr()) == expected
    heap.close()
    assert describe_address(start + 28) is None


def allocate_alike(ctx):
    heap = shared_heap(ctx)
    tensors = [heap.empty((n * n,), torch.int16) for n in range(20)]
    del tensors[3:9]
    heap.meet()
    tensors += [heap.empty((n,), torch.float64) for n in range(7)]
    return [heap.offset(tensor) for tensor in tensors]


@pytest.mark.ranks(1, 2, 3)
def test_offsets_are_the_same_on_every_rank(ranks):
    offsets = ranks.run(allocate_alike)
    assert all(each == offsets[0] for each in offsets)


def look_at_peers(ctx):
    heap = shared_heap(ctx)
    rank, size = heap.group.rank, heap.group.size
    heap.empty((3,), torch.float32)
    tensor = heap.empty((4, 6), torch.int32)
    tensor.copy_(torch.arange(24).view(4, 6) + 1000 * rank)
    ctx.barrier()
    for peer in range(size):
        part = heap.peer(tensor[1:, ::2].t(), peer)
        assert torch.equal(part.cpu(), (torch.arange(24).view(4, 6) + 1000 * peer)[1:, ::2].t())
        assert (part.stride(), part.storage_offset()) == ((2, 6), 6)
    waves = heap.empty((3,), torch.complex64)
    waves.copy_(torch.tensor([1 + 2j, 3 - 4j, 5j]) * (rank + 1))
    ctx.barrier()
    for peer in range(size):
        expected = torch.tensor([1 - 2j, 3 + 4j, -5j]) * (peer + 1)
        assert torch.equal(heap.peer(waves.conj(), peer).cpu(), expected)
        assert torch.equal(heap.peer(waves.conj().imag, peer).cpu(), expected.imag)
    ctx.barrier()
    heap.peer(tensor, (rank + 1) % size)[0, 0] = -rank
    ctx.barrier()
    assert tensor[0, 0] == -((rank - 1) % size)
    # A peer's copy holds the block, so that what is read through it is not somebody else's.
    copy = heap.peer(tensor, 0)
    del tensor, part, waves
    heap.meet()
    assert heap.stats().count == 1
    address = copy.data_ptr()
    assert describe_address(address + 4) == "rank 0's int32[4, 6], element 1 (offset 0x4)"
    del copy
    heap.meet()
    assert heap.stats().count == 0


@pytest.mark.ranks(2, 3)
def test_a_peers_copy_is_a_tensor(ranks):
    ranks.run(look_at_peers)


def look_at_nobody(ctx):
    tensor = ctx.zeros(4)
    for wrong in (-1, ctx.num_ranks, "left"):
        with pytest.raises(RankOutOfRangeError, match=f"There is no rank {wrong!r}: the group has {ctx.num_ranks}"):
            ctx.heap.peer(tensor, wrong)


@pytest.mark.usefixtures("mistaken")
def test_a_copy_of_no_rank_is_told(ranks):
    ranks.run(look_at_nobody)
