"""Tiles between ranks: every primitive, any shape and strides, and calls in a row with nobody resetting locks."""

from functools import partial

import pytest
import torch
import triton
from covering import EVERYTHING, SAMPLED, covering
from covering import RANKS as ALL_RANKS
from patterns import assert_same_bits, pattern

from iris.errors import IrisError
from iris.x.locks import PERIOD
from x import tile_kernels

SHAPES = [(16, 32), (1, 1), (23, 45), (40, 7)]
BLOCKS = [(16, 16), (8, 32)]
MORE = [torch.float16, torch.float64, torch.float8_e5m2] if EVERYTHING else []
MOVED = [torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn, *MORE]
SUMMED = [torch.bfloat16, torch.float32, torch.int32, torch.bool, torch.float8_e4m3fn, *MORE]
RANKS = ALL_RANKS if EVERYTHING else (3,)
CALLS = 5 if EVERYTHING else 2
# Whether the columns of src, and of dst, lie in one piece, and not the rows.
BY_COLUMNS = [[False, True], [False, True]]


def tiles(M, N, block):
    return triton.cdiv(M, block[0]), triton.cdiv(N, block[1])


def matrix(make, shape, dtype, by_columns):
    """One matrix or several of zeros, made by a function like `torch.zeros`."""
    *several, M, N = shape
    return make(*several, N, M, dtype=dtype).mT if by_columns else make(*shape, dtype=dtype)


def on_heap(ctx, tensor, by_columns):
    return matrix(ctx.zeros, tensor.shape, tensor.dtype, by_columns).copy_(tensor)


def numbers(shape, dtype, rank, call=0):
    """Values whose sum depends on the order in which they are added, and on how often they are rounded."""
    if not dtype.is_floating_point:
        return pattern(shape, dtype, rank, call)
    generator = torch.Generator().manual_seed(1009 * call + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def expected_sum(shape, dtype, size, call=0):
    wide = torch.float32 if dtype.is_floating_point and dtype.itemsize <= 4 else dtype
    total = numbers(shape, dtype, 0, call).to(wide)
    for rank in range(1, size):
        total += numbers(shape, dtype, rank, call).to(wide)
    return total.to(dtype)


def gathered(ctx, shape, block, dtype, dim, by_columns):
    M, N = shape
    shards = [pattern(shape, dtype, rank) for rank in range(ctx.num_ranks)]
    values = shards[ctx.cur_rank].to(ctx.device)
    whole = (M * ctx.num_ranks, N) if dim == 0 else (M, N * ctx.num_ranks)
    dst = matrix(ctx.zeros, whole, dtype, by_columns)
    ctx.barrier()
    tile_kernels.all_gather[tiles(M, N, block)](
        ctx.get_device_context(), values, dst, M, N, *whole, *dst.stride(), dim, *block
    )
    ctx.barrier()
    assert_same_bits(dst, torch.cat(shards, dim))


@pytest.mark.ranks(*RANKS)
def test_all_gather(ranks):
    for case in covering(SHAPES, BLOCKS, MOVED, [0, 1], [False, True], ranks=ranks):
        ranks.run(gathered, *case)


def exchanged(ctx, rows, per_rank, block, dtype, holds, src_by_columns, dst_by_columns):
    size, rank = ctx.num_ranks, ctx.cur_rank
    shape = (rows, per_rank * size)
    inputs = [pattern(shape, dtype, peer) for peer in range(size)]
    # Of a tile that brings its values, src has nothing to say.
    src = matrix(partial(torch.zeros, device=ctx.device), shape, dtype, src_by_columns)
    values = inputs[rank].to(ctx.device)
    if not holds:
        src.copy_(values)
    dst = matrix(ctx.zeros, shape, dtype, dst_by_columns)
    ctx.barrier()
    tile_kernels.all_to_all[tiles(*shape, block)](
        ctx.get_device_context(), values, src, dst, *shape, per_rank, *src.stride(), *dst.stride(), holds, *block
    )
    ctx.barrier()
    assert_same_bits(dst, torch.cat([x[:, rank * per_rank : (rank + 1) * per_rank] for x in inputs], 1))


@pytest.mark.ranks(*RANKS)
def test_all_to_all(ranks):
    """Chunks narrower than a tile, wider, and none of its divisors."""
    for case in covering([1, 19], [1, 5, 40], BLOCKS, MOVED, [False, True], *BY_COLUMNS, ranks=ranks):
        ranks.run(exchanged, *case)


def fetched(ctx, shape, block, dtype, by_columns):
    M, N = shape
    src = on_heap(ctx, pattern(shape, dtype, ctx.cur_rank), by_columns)
    grid = tiles(M, N, block)
    ctx.barrier()
    for source in range(ctx.num_ranks):
        dst = torch.ones(grid[0] * block[0], grid[1] * block[1], dtype=dtype, device=ctx.device)
        tile_kernels.gather[grid](ctx.get_device_context(), src, dst, M, N, *src.stride(), source, *block)
        assert_same_bits(dst[:M, :N].contiguous(), pattern(shape, dtype, source))
        dst[:M, :N] = 0
        assert not dst.float().any(), "past the edge are zeros"
    ctx.barrier()


@pytest.mark.ranks(*RANKS)
def test_gather(ranks):
    for case in covering(SHAPES, BLOCKS, MOVED, [False, True], ranks=ranks):
        ranks.run(fetched, *case)


# As they are after so many calls that they overflow 32 bits in the next one: those of int32 begin anew, at 0.
LOCKS = [(torch.int32, -PERIOD.value), (torch.int64, (1 << 32) - PERIOD.value)]


def locks_of(ctx, grid, dtype, start):
    return ctx.full((grid[0] * grid[1],), start, dtype=dtype)


def reduced(ctx, variant, shape, block, dtype, holds, locks, src_by_columns, dst_by_columns):
    """Two launches of several calls each, with no meeting between them; data differ in each."""
    size, (M, N) = ctx.num_ranks, shape
    grid = tiles(M, N, block)
    calls = CALLS if holds else 1
    locks = locks_of(ctx, grid, *locks)
    first = 0
    src = matrix(ctx.zeros, shape, dtype, src_by_columns)
    outs = [matrix(ctx.zeros, (calls, M, N), dtype, dst_by_columns) for _ in range(2)]
    ctx.barrier()
    for out in outs:
        values = torch.stack([numbers(shape, dtype, ctx.cur_rank, first + call) for call in range(calls)])
        values = values.to(ctx.device)
        if not holds:
            # On return from the last call nobody reads it any more.
            src.copy_(values[0])
        tile_kernels.all_reduce[grid](
            ctx.get_device_context(), values, src, out, locks, M, N, *src.stride(), *out.stride()[1:], calls, M * N,
            variant, holds, *block,
        )  # fmt: skip
        first += calls
    ctx.barrier()
    for n, out in enumerate(outs):
        for call in range(calls):
            assert_same_bits(out[call], expected_sum(shape, dtype, size, n * calls + call))


@pytest.mark.ranks(*RANKS)
@pytest.mark.parametrize("variant", ["one_shot", "two_shot"])
def test_all_reduce(ranks, variant):
    cases = covering(SHAPES, BLOCKS, SUMMED, [True, False], LOCKS, *BY_COLUMNS, ranks=ranks)
    for case in cases[variant == "one_shot" :: 2] if SAMPLED else cases:
        ranks.run(reduced, variant, *case)


def added(ctx, variant, shape, block, dtype, locks, by_columns):
    """Whole numbers, whose sums are exact in any order."""
    M, N = shape
    grid = tiles(M, N, block)
    inputs = [(pattern(shape, torch.int8, rank) % 8).to(dtype) for rank in range(ctx.num_ranks)]
    dst = on_heap(ctx, torch.ones(shape, dtype=dtype), by_columns)
    locks = ctx.zeros(grid[0] * grid[1], dtype=locks)
    ctx.barrier()
    values = inputs[ctx.cur_rank].to(ctx.device)
    tile_kernels.all_reduce[grid](
        ctx.get_device_context(),
        values,
        dst,
        dst,
        locks,
        M,
        N,
        *dst.stride(),
        *dst.stride(),
        1,
        0,
        variant,
        True,
        *block,
    )
    ctx.barrier()
    assert_same_bits(dst, sum(inputs) + torch.ones(shape, dtype=dtype))
    assert not locks.any()


@pytest.mark.ranks(*RANKS)
@pytest.mark.parametrize("variant", ["atomic", "spinlock"])
def test_all_reduce_in_any_order(ranks, variant):
    dtypes = [torch.float32, torch.float16, torch.int32]
    for case in covering(SHAPES, BLOCKS, dtypes, [torch.int32, torch.int64], [False, True], ranks=ranks):
        ranks.run(added, variant, *case)


def scattered(ctx, M, columns, block, dtype, holds, locks, src_by_columns, dst_by_columns):
    """Several calls in one launch, or one in each of several, with no meeting between them; data differ in each."""
    size, rank = ctx.num_ranks, ctx.cur_rank
    rows = triton.cdiv(M, size)
    grid = tiles(M, columns, block)
    locks = locks_of(ctx, grid, *locks)
    values = torch.stack([numbers((M, columns), dtype, rank, call) for call in range(CALLS)]).to(ctx.device)
    # What lies past the matrix is not added up, and what lies past a rank's rows is not written.
    around = torch.full((rows * size, columns), 7, dtype=torch.float32).to(dtype)
    src = on_heap(ctx, around, src_by_columns)
    dst = matrix(partial(torch.zeros, device=ctx.device), (CALLS + 1, rows, columns), dtype, dst_by_columns)
    dst.copy_(around[:rows])
    ctx.barrier()
    calls = CALLS if holds else 1
    for first in range(0, CALLS, calls):
        if not holds:
            # On return from the last call nobody reads it any more.
            src[:M].copy_(values[first])
        tile_kernels.reduce_scatter[grid](
            ctx.get_device_context(), values, src, dst[first:], locks, M, columns, *src.stride(), *dst.stride()[1:],
            rows, calls, M * columns, rows * columns, holds, *block,
        )  # fmt: skip
    ctx.barrier()
    for call in range(CALLS):
        expected = around.clone()
        expected[:M] = expected_sum((M, columns), dtype, size, call)
        assert_same_bits(dst[call], expected[rank * rows : (rank + 1) * rows])
    assert_same_bits(dst[CALLS], around[:rows])
    assert_same_bits(src[M:], around[M:])


@pytest.mark.ranks(*RANKS)
def test_reduce_scatter(ranks):
    """Shards of which a tile has several, and shards of several tiles; shards of fewer rows, and of none."""
    for rows, *case in covering([1, 5, 20], [1, 33], BLOCKS, SUMMED, [True, False], LOCKS, *BY_COLUMNS, ranks=ranks):
        for M in {rows, rows * ranks.num_ranks}:
            ranks.run(scattered, M, *case)


def mistaken(ctx, what, message):
    with pytest.raises(IrisError, match=message):
        tile_kernels.mistaken[(1,)](ctx.get_device_context(), ctx.zeros(16, 16), ctx.zeros(1), 16, 16, what, 16, 16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU Triton says it: tests/codegen/test_tiles.py")
@pytest.mark.parametrize("what", tile_kernels.MISTAKES)
def test_what_does_not_fit_is_told(ranks, what):
    ranks.run(mistaken, what, tile_kernels.MISTAKES[what])
