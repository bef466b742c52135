"""Atomics: what they return, what they leave, and that they are atomic between processes."""

import mmap
import os

import pytest
import torch
import triton
import triton.language as tl

import iris.simulator

assert iris.simulator.ACTIVE

INTEGERS = [torch.int32, torch.int64, torch.uint32, torch.uint64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@triton.jit
def operate(p, value, old, OP: tl.constexpr, active, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(value + i)
    m = i < active
    if OP == "add":
        o = tl.atomic_add(p + i, v, mask=m)
    elif OP == "max":
        o = tl.atomic_max(p + i, v, mask=m)
    elif OP == "min":
        o = tl.atomic_min(p + i, v, mask=m)
    elif OP == "xchg":
        o = tl.atomic_xchg(p + i, v, mask=m)
    elif OP == "and":
        o = tl.atomic_and(p + i, v, mask=m)
    elif OP == "or":
        o = tl.atomic_or(p + i, v, mask=m)
    elif OP == "xor":
        o = tl.atomic_xor(p + i, v, mask=m)
    tl.store(old + i, o)


RESULT = {
    "add": lambda a, b: a + b,
    "max": max,
    "min": min,
    "xchg": lambda a, b: b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
}
WIDE_FLOAT_OPS = ["add", "max", "min", "xchg"]


@pytest.mark.parametrize(
    "dtype, ops",
    [(dtype, list(RESULT)) for dtype in INTEGERS]
    + [(torch.float16, ["add"]), (torch.bfloat16, ["add"])]  # Triton has no other for 16 bits
    + [(torch.float32, WIDE_FLOAT_OPS), (torch.float64, WIDE_FLOAT_OPS)],
)
def test_every_lane_is_updated_and_masked_lanes_return_zero(dtype, ops):
    n, active = 16, 13
    signed = dtype not in (torch.uint32, torch.uint64)
    start = [i * 5 - (30 if signed else 0) if signed or i else 2 for i in range(n)]
    value = [(i * 7) % 16 - (8 if signed else 0) for i in range(n)]
    for op in ops:
        p, v = torch.tensor(start).to(dtype), torch.tensor(value).to(dtype)
        old = torch.full((n,), 99).to(dtype)
        operate[(1,)](p, v, old, op, active, n)
        expected = [RESULT[op](a, b) for a, b in zip(start, value, strict=True)][:active] + start[active:]
        assert p.tolist() == torch.tensor(expected).to(dtype).tolist(), op
        assert old.tolist() == torch.tensor(start[:active] + [0] * 3).to(dtype).tolist(), op


@triton.jit
def add_everywhere(p, old, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(old + i, tl.atomic_add(p + i % 2, (i + 1).to(p.dtype.element_ty)))


@pytest.mark.parametrize("dtype", INTEGERS + FLOATS)
def test_lanes_may_name_the_same_address(dtype):
    p, old = torch.zeros(2).to(dtype), torch.zeros(8).to(dtype)
    add_everywhere[(1,)](p, old, 8)
    assert p.tolist() == [1 + 3 + 5 + 7, 2 + 4 + 6 + 8]
    assert old.tolist() == [0, 0, 1, 2, 4, 6, 9, 12]


@triton.jit
def swap(p, cmp, val, old):
    tl.store(old, tl.atomic_cas(p, tl.load(cmp), tl.load(val)))


@pytest.mark.parametrize("dtype", [torch.int16, *INTEGERS, *FLOATS])
def test_compare_and_swap(dtype):
    p, old = torch.tensor([3, 5]).to(dtype), torch.zeros(1).to(dtype)
    for expected, left in ((4, 3), (3, 7)):
        swap[(1,)](p, torch.tensor([expected]).to(dtype), torch.tensor([7]).to(dtype), old)
        assert (old.item(), *p.tolist()) == (3, left, 5)


def test_compare_and_swap_of_64_bits_compares_all_of_them():
    p, old = torch.tensor([1 << 32, 0]), torch.zeros(1, dtype=torch.int64)
    for each in p, p[1:]:
        swap[(1,)](each, torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64), old)
    assert p.tolist() == [1 << 32, 1]


@triton.jit
def swap_constants(p, N: tl.constexpr):
    tl.atomic_cas(p + tl.arange(0, N) if N else p, 0, 1)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint32, torch.int64, torch.float32])
@pytest.mark.parametrize("N", [0, 4])
def test_compare_and_swap_converts_and_broadcasts_nothing(dtype, N):
    """Plain numbers are of int32: where the elements are others, or several, this does not compile."""
    p = torch.zeros(4).to(dtype)
    if N == 0 and dtype in (torch.int32, torch.uint32):
        swap_constants[(1,)](p, N)
        assert p.tolist() == [1, 0, 0, 0]
    else:
        with pytest.raises(TypeError, match=r"cmp of int32 does not compile .* Give tl.full\(\[.*\], cmp, "):
            swap_constants[(1,)](p, N)


@triton.jit
def exchange_scalar(p, value):
    tl.store(p + 1, tl.atomic_xchg(p, value))


def test_nan_can_be_exchanged_and_added_to():
    p = torch.tensor([float("nan"), 0.0])
    exchange_scalar[(1,)](p, 2.5)
    assert p[0] == 2.5 and p[1].isnan()
    p = torch.tensor([float("nan"), 0.0], dtype=torch.bfloat16)
    add_everywhere[(1,)](p, torch.zeros(2, dtype=torch.bfloat16), 2)
    assert p[0].isnan() and p[1] == 2.0


@triton.jit
def count(p, rounds):
    for _ in range(rounds):
        tl.atomic_add(p, tl.full((), 1, p.dtype.element_ty))


@triton.jit
def count_under_lock(lock, p, rounds):
    for _ in range(rounds):
        while tl.atomic_cas(lock, 0, 1) != 0:
            pass
        tl.store(p, tl.load(p) + 1)
        tl.atomic_xchg(lock, 0)


def in_processes(n: int, work) -> None:
    """Run ``work(i)`` in ``n`` forked processes at once."""
    children = []
    for i in range(n):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                work(i)
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * n


@pytest.fixture
def shared():
    file = os.memfd_create("shared")
    os.ftruncate(file, 4096)
    memory = mmap.mmap(file, 4096)
    yield torch.frombuffer(memory, dtype=torch.uint8)
    os.close(file)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, *FLOATS])
def test_additions_of_four_processes_all_count(shared, dtype):
    # Neighbours of 16 bits share a word: both are counted, one by each pair of processes.
    counters = shared[: 2 * dtype.itemsize].view(dtype)
    count[(1,)](torch.zeros(1, dtype=dtype), 1)  # the source is read before the processes part
    in_processes(4, lambda i: count[(1,)](counters[i % 2 :], 64))
    assert counters.tolist() == [128, 128]


def test_a_lock_between_processes_excludes(shared):
    words = shared[:8].view(torch.int32)
    in_processes(2, lambda i: count_under_lock[(1,)](words, words[1:], 100))
    assert words.tolist() == [0, 200]
