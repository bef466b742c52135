"""The nine atomics: what they leave and return, for every dtype that Triton has them for, and that they are atomic."""

import numpy
import pytest
import torch
import triton
from covering import covering

from language import atomic_kernels

FORMS = ["triton_context", "triton_functional", "gluon_context", "gluon_functional"]
INTEGERS = [torch.int32, torch.uint32, torch.int64, torch.uint64]
FLOATS = [torch.float32, torch.float64]
HALVES = [torch.float16, torch.bfloat16]
# Triton has these atomics for these types; for the rest it says at compile time that it does not.
SUPPORTED = {
    "add": INTEGERS + FLOATS + HALVES,
    "sub": INTEGERS + FLOATS + HALVES,
    "xchg": INTEGERS + FLOATS,
    "and": INTEGERS,
    "or": INTEGERS,
    "xor": INTEGERS,
    "min": INTEGERS + FLOATS,
    "max": INTEGERS + FLOATS,
}
CASES = [(operation, dtype) for operation, dtypes in SUPPORTED.items() for dtype in dtypes]
ORDERS = [
    ("relaxed", "sys"),
    ("acquire", "sys"),
    ("release", "sys"),
    ("acq_rel", "sys"),
    ("acq_rel", "gpu"),
    ("relaxed", "cta"),
]
REFERENCE = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "xchg": lambda a, b: b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "min": numpy.minimum,
    "max": numpy.maximum,
}
N, BLOCK = 300, 128


def numbers(dtype, rank, call, n=N):
    """Values that differ by position, rank and call; integers use all their bits, halves stay exact under addition."""
    generator = numpy.random.default_rng([rank, call])
    if dtype in HALVES:
        return torch.from_numpy(generator.integers(-60, 60, n)).to(dtype)
    if dtype in FLOATS:
        return torch.from_numpy(generator.standard_normal(n)).to(dtype)
    bits = torch.from_numpy(generator.integers(0, 256, n * dtype.itemsize, dtype=numpy.uint8))
    return bits.view(dtype)


def on_numpy(tensor):
    return (tensor.float() if tensor.dtype in HALVES else tensor).cpu().numpy()


def update(ctx, form, operation, dtype, sem, scope):
    """Everybody updates its neighbour's copy, so each element has one writer and one right result."""
    rank, size = ctx.get_rank(), ctx.get_num_ranks()
    peer, origin = (rank + 1) % size, (rank - 1) % size
    target, values, old = (ctx.empty(N + 20, dtype=dtype) for _ in range(3))
    for call in range(2):
        target.copy_(numbers(dtype, rank, 3 * call, N + 20))
        values.copy_(numbers(dtype, rank, 3 * call + 1, N + 20))
        ctx.barrier()
        getattr(atomic_kernels, form)[(triton.cdiv(N, BLOCK),)](
            ctx.get_device_context(),
            ctx.get_heap_bases(),
            target,
            values,
            old,
            N,
            rank,
            peer,
            operation,
            sem,
            scope,
            BLOCK,
        )
        ctx.barrier()
        before = on_numpy(numbers(dtype, rank, 3 * call, N + 20))
        with numpy.errstate(over="ignore"):
            expected = REFERENCE[operation](before, on_numpy(numbers(dtype, origin, 3 * call + 1, N + 20)))
        expected[N:] = before[N:]
        numpy.testing.assert_array_equal(on_numpy(target), expected)
        numpy.testing.assert_array_equal(on_numpy(old)[:N], on_numpy(numbers(dtype, peer, 3 * call, N + 20))[:N])
        ctx.barrier()


@pytest.mark.parametrize(("form", "case", "order"), covering(FORMS, CASES, ORDERS))
def test_the_result_and_the_old_value(ranks, form, case, order):
    ranks.run(update, form, *case, *order)


def swap(ctx, language, dtype, functional):
    rank, size = ctx.get_rank(), ctx.get_num_ranks()
    peer = (rank + 1) % size
    target, old = ctx.zeros(4, dtype=dtype), ctx.zeros(4, dtype=dtype)
    # Values that agree in their low 32 bits: a comparison of 4 bytes would take them for equal.
    wide = 1 << 32 if dtype.itemsize == 8 else 0
    target.copy_(torch.tensor([7, 8, 7 + wide, 7], dtype=dtype))
    ctx.barrier()
    kernel = getattr(atomic_kernels, f"{language}_cas")
    kernel[(4,)](ctx.get_device_context(), ctx.get_heap_bases(), target, old, 7, 100 + rank, rank, peer, functional)
    ctx.barrier()
    mine = 100 + (rank - 1) % size
    expected = [mine, 8, 7 + wide if wide else mine, mine]
    assert target.tolist() == expected
    assert old.tolist() == [7, 8, 7 + wide, 7]


@pytest.mark.parametrize(
    ("language", "dtype", "functional"),
    covering(["triton", "gluon"], [torch.int32, torch.int64, torch.float32, torch.float64], [False, True]),
)
def test_compare_and_swap_compares_the_whole_element(ranks, language, dtype, functional):
    ranks.run(swap, language, dtype, functional)


def draw(ctx, language, dtype, programs, rounds):
    counter, tickets = ctx.zeros(1, dtype=dtype), ctx.zeros(programs * rounds, dtype=dtype)
    ctx.barrier()
    kernel = getattr(atomic_kernels, f"{language}_count")
    kernel[(programs,)](ctx.get_device_context(), counter, tickets, rounds, rounds)
    ctx.barrier()
    return tickets.tolist(), int(counter.item())


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("language", ["triton", "gluon"])
def test_no_ticket_is_drawn_twice(ranks, language):
    programs, rounds = 4, 50
    results = ranks.run(draw, language, torch.int64, programs, rounds)
    total = programs * rounds * ranks.num_ranks
    assert sorted(sum((tickets for tickets, _ in results), [])) == list(range(total))
    assert results[0][1] == total


def accumulate(ctx, dtype, form):
    """All ranks add to rank 0 at once; small integers, so that every order of additions gives the same sum."""
    rank, size = ctx.get_rank(), ctx.get_num_ranks()
    target, values, old = (ctx.zeros(64, dtype=dtype) for _ in range(3))
    values.copy_(torch.arange(64) % 5 + rank)
    ctx.barrier()
    for _ in range(8):
        getattr(atomic_kernels, form)[(1,)](
            ctx.get_device_context(),
            ctx.get_heap_bases(),
            target,
            values,
            old,
            64,
            rank,
            0,
            "add",
            "relaxed",
            "sys",
            64,
        )
    ctx.barrier()
    if rank == 0:
        expected = 8 * sum(torch.arange(64) % 5 + peer for peer in range(size))
        assert target.double().cpu().tolist() == expected.double().tolist()


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("dtype", "form"), covering(HALVES + FLOATS + [torch.int32], FORMS[:1] + FORMS[2:3]))
def test_additions_of_all_ranks_at_once_are_all_counted(ranks, dtype, form):
    ranks.run(accumulate, dtype, form)


def swap_block(ctx, language, dtype, functional):
    rank, size = ctx.get_rank(), ctx.get_num_ranks()
    target, old = ctx.zeros(64, dtype=dtype), ctx.zeros(64, dtype=dtype)
    held = torch.arange(64, dtype=dtype) % 3
    target.copy_(held)
    ctx.barrier()
    kernel = getattr(atomic_kernels, f"{language}_cas_block")
    kernel[(1,)](ctx.get_device_context(), ctx.get_heap_bases(), target, old, 2, rank, (rank + 1) % size, functional)
    ctx.barrier()
    swapped = (rank - 1) % size * 1000 + torch.arange(64, dtype=dtype)
    assert target.tolist() == torch.where(held == 2, swapped, held).tolist()
    assert old.tolist() == held.tolist()


@pytest.mark.parametrize(
    ("language", "dtype", "functional"),
    covering(["triton", "gluon"], [torch.int32, torch.int64, torch.float32, torch.float64], [False, True]),
)
def test_compare_and_swap_of_a_block_with_one_expected_value(ranks, language, dtype, functional):
    ranks.run(swap_block, language, dtype, functional)


def add_under_one_mask(ctx, language):
    rank, size = ctx.cur_rank, ctx.num_ranks
    kernel, added = getattr(atomic_kernels, f"{language}_one_mask"), (rank - 1) % size * 1000 + torch.arange(128)
    for mask, there in ((None, (rank - 1) % size == 1), (True, True), (False, False)):
        target = ctx.zeros(128, dtype=torch.int32)
        ctx.barrier()
        kernel[(1,)](ctx.get_device_context(), target, (rank + 1) % size, 1, mask)
        ctx.barrier()
        assert target.tolist() == (added * there).tolist(), mask


@pytest.mark.ranks(3)
@pytest.mark.parametrize("language", ["triton", "gluon"])
def test_one_mask_for_a_block(ranks, language):
    ranks.run(add_under_one_mask, language)


# The dtype of the target, values of another one and a constant, and what is added of them.
LARGE = (1 << 40) + 5
CASTS = {
    "low bits": (torch.int32, torch.int64, [LARGE, -LARGE, (1 << 32) - 1, 3], LARGE, [5, -5, -1, 3, 5]),
    "bits of the other sign": (torch.uint32, torch.int32, [-1, -3, 3, 4], (1 << 32) - 1, [-1, -3, 3, 4, -1]),
    "whole parts": (torch.int64, torch.float32, [1.9, -1.9, 0.5, 3.0], 2.75, [1, -1, 0, 3, 2]),
    "rounded": (torch.float32, torch.int32, [(1 << 24) + 1, -3, 0, 1 << 30], 5, [1 << 24, -3, 0, 1 << 30, 5]),
}  # fmt: skip


def add_of_another_dtype(ctx, language, what):
    dtype, other, values, constant, expected = CASTS[what]
    target, plain = ctx.zeros(5, dtype=dtype), torch.zeros(5, dtype=dtype, device=ctx.device)
    ctx.barrier()
    peer, values = (ctx.cur_rank + 1) % ctx.num_ranks, torch.tensor(values, dtype=other, device=ctx.device)
    kernel = getattr(atomic_kernels, f"{language}_cast")
    kernel[(1,)](ctx.get_device_context(), target, plain, values, peer, constant)
    ctx.barrier()
    assert target.tolist() == plain.tolist() == [n % (1 << 32) if dtype is torch.uint32 else n for n in expected]


@pytest.mark.parametrize("what", CASTS)
@pytest.mark.parametrize("language", ["triton", "gluon"])
def test_values_are_cast_as_triton_casts_them(ranks, language, what):
    ranks.run(add_of_another_dtype, language, what)
