"""load, store, get, put and copy: every dtype, language and form, 1 to 8 ranks."""

import pytest
import torch
import triton
from covering import EVERYTHING, covering
from patterns import assert_same_bits, fill, pattern

from language import move_kernels, option_kernels

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
]  # fmt: skip
FORMS = ["triton_context", "triton_functional", "gluon_context", "gluon_functional"]
OPERATIONS = ["load", "store", "get", "put", "copy_from", "copy_to"]
READS = ("load", "get", "copy_from")
SIZES = [1, 255, 1000]  # below, at and above a block, none a multiple of it
BLOCK = 256
GUARD = 64


def supported(dtype):
    # The compiler for NVIDIA has no fnuz formats; the simulator and AMD have.
    fnuz = dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
    return not (fnuz and torch.cuda.is_available() and torch.version.hip is None)


def move(ctx, form, operation, dtype, n, hop):
    """Everybody moves to or from the rank ``hop`` further on, twice with changed data."""
    rank, size = ctx.get_rank(), ctx.get_num_ranks()
    peer, origin = (rank + hop) % size, (rank - hop) % size
    source, target = ctx.empty(n, dtype=dtype), ctx.empty(n + GUARD, dtype=dtype)
    grid = (triton.cdiv(n, BLOCK),)
    for call in range(2):
        fill(source, rank, call)
        fill(target, rank, call + 100)
        ctx.barrier()
        getattr(move_kernels, form)[grid](
            ctx.get_device_context(), ctx.get_heap_bases(), source, target, n, rank, peer, operation, BLOCK
        )
        ctx.barrier()
        sender = peer if operation in READS else origin
        assert_same_bits(target[:n], pattern((n,), dtype, sender, call))
        assert_same_bits(target[n:], pattern((n + GUARD,), dtype, rank, call + 100)[n:])
        assert_same_bits(source, pattern((n,), dtype, rank, call))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("form", "operation", "dtype", "n"), covering(FORMS, OPERATIONS, filter(supported, DTYPES), SIZES)
)
def test_data_arrives_where_it_should_and_nowhere_else(ranks, form, operation, dtype, n):
    ranks.run(move, form, operation, dtype, n, 1)


@pytest.mark.ranks(1, 3, *([4, 8] if EVERYTHING else []))
@pytest.mark.parametrize(("form", "operation", "hop"), covering(FORMS, OPERATIONS, [0, 1, -1]))
def test_any_number_of_ranks(ranks, form, operation, hop):
    ranks.run(move, form, operation, torch.float32, 300, hop)


def move_tiles(ctx, language, dtype):
    rank, size = ctx.get_rank(), ctx.get_num_ranks()
    M, N, stride = 37, 50, 61
    source, target = ctx.empty(M, stride, dtype=dtype), ctx.empty(N, M, dtype=dtype)
    fill(source, rank)
    fill(target, rank, 1)
    ctx.barrier()
    grid = (triton.cdiv(M, 16), triton.cdiv(N, 32))
    kernel = getattr(move_kernels, f"{language}_tile")
    kernel[grid](ctx.get_device_context(), source, target, M, N, stride, (rank + 1) % size, 16, 32)
    ctx.barrier()
    assert_same_bits(target, pattern((M, stride), dtype, (rank - 1) % size)[:, :N].T.contiguous())


@pytest.mark.parametrize(
    ("language", "dtype"), covering(["triton", "gluon"], [torch.float16, torch.float32, torch.int64, torch.int8])
)
def test_tiles_of_matrices(ranks, language, dtype):
    ranks.run(move_tiles, language, dtype)


def move_scalars(ctx, language, dtype):
    rank, size = ctx.get_rank(), ctx.get_num_ranks()
    source, target = ctx.empty(5, dtype=dtype), ctx.empty(5, dtype=dtype)
    fill(source, rank)
    fill(target, rank, 1)
    ctx.barrier()
    kernel = getattr(move_kernels, f"{language}_scalar")
    kernel[(3,)](ctx.get_device_context(), source, target, (rank + 1) % size)
    ctx.barrier()
    # Everybody read its neighbour's value and wrote it back to the neighbour.
    assert_same_bits(target[:3], pattern((5,), dtype, rank)[:3])
    assert_same_bits(target[3:], pattern((5,), dtype, rank, 1)[3:])


@pytest.mark.parametrize(
    ("language", "dtype"), covering(["triton", "gluon"], [torch.bool, torch.bfloat16, torch.float64, torch.float8_e5m2])
)
def test_scalars(ranks, language, dtype):
    ranks.run(move_scalars, language, dtype)


def move_far(ctx, language):
    """Offsets, and distances between heaps, that do not fit 32 bits, signed or unsigned."""
    import iris

    rank, size = ctx.get_rank(), ctx.get_num_ranks()
    with iris.iris(9 << 29) as large:
        gap = large.empty((1 << 32) + 512, dtype=torch.uint8)
        source, target = large.empty(1000), large.empty(1000)
        assert large.heap.offset(source) > 1 << 32
        fill(source, rank)
        fill(target, rank, 1)
        large.barrier()
        kernel = getattr(move_kernels, f"{language}_context")
        args = large.get_device_context(), large.get_heap_bases(), source, target, 1000, rank, (rank + 1) % size
        kernel[(4,)](*args, "put", BLOCK)
        large.barrier()
        assert_same_bits(target, pattern((1000,), torch.float32, (rank - 1) % size))
        # The same from inside one tensor, past 4 GiB of it.
        fill(gap[-4096:], rank, 2)
        large.barrier()
        kernel[(4,)](
            large.get_device_context(),
            large.get_heap_bases(),
            gap[-4096:],
            gap[-2048:],
            1000,
            rank,
            (rank + 1) % size,
            "put",
            BLOCK,
        )
        large.barrier()
        assert_same_bits(gap[-2048:-1048], pattern((4096,), torch.uint8, (rank - 1) % size, 2)[:1000])


@pytest.mark.parametrize("language", ["triton", "gluon"])
def test_beyond_4_gib(ranks, language):
    ranks.run(move_far, language)


def move_with_options(ctx, language, operation):
    rank, size = ctx.get_rank(), ctx.get_num_ranks()
    peer = (rank + 1) % size
    source, target = ctx.empty(256, dtype=torch.int32), ctx.zeros(256, dtype=torch.int32)
    fill(source, rank)
    ctx.barrier()
    kernel = getattr(move_kernels, f"{language}_options")
    kernel[(1,)](ctx.get_device_context(), ctx.get_heap_bases(), source, target, 100, rank, peer, operation, 256)
    ctx.barrier()
    masked = "get" in operation  # the write is masked as well
    assert_same_bits(target[:100], pattern((256,), torch.int32, peer)[:100])
    assert target[100:].tolist() == [0 if masked else -7] * 156


@pytest.mark.parametrize("language", ["triton", "gluon"])
@pytest.mark.parametrize("operation", ["other", "get other", "cache", "volatile", "functional", "functional get"])
def test_optional_arguments(ranks, language, operation):
    ranks.run(move_with_options, language, operation)


def move_with_modifiers(ctx, language, operation, hint):
    """After ``begin`` elements, which is a multiple of the hint; of each operation the right elements move."""
    rank, size = ctx.get_rank(), ctx.get_num_ranks()
    peer, origin, begin, n = (rank + 1) % size, (rank - 1) % size, 16, 64
    source, target = ctx.empty(128, dtype=torch.int32), ctx.zeros(128, dtype=torch.int32)
    fill(source, rank)
    ctx.barrier()
    getattr(option_kernels, f"{language}_moves")[(1,)](
        ctx.get_device_context(), source, target, begin, peer, operation, ".cg", ".wt", hint, n
    )
    ctx.barrier()
    of = {each: pattern((128,), torch.int32, each) for each in (rank, peer, origin)}
    expected = torch.zeros(128, dtype=torch.int32)
    if operation == "load":
        expected[:n] = of[peer][begin : begin + n]
    elif operation in ("get", "copy"):
        expected[begin : begin + n] = of[peer][begin : begin + n]
    elif operation == "put":
        expected[begin : begin + n] = of[origin][begin : begin + n]
    elif operation == "cas":
        expected[begin] = of[origin][begin]
    else:
        expected[begin : begin + n] = of[origin][:n]
    assert_same_bits(target, expected)


@pytest.mark.parametrize(
    ("language", "operation", "hint"),
    covering(["triton", "gluon"], ["load", "store", "get", "put", "copy", "add", "cas"], [None, 16]),
)
def test_modifiers_and_hints_of_the_context(ranks, language, operation, hint):
    ranks.run(move_with_modifiers, language, operation, hint)
