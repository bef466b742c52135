"""Locks that a caller has written: every rank says whose, nobody waits for ever, and zeroed locks are good again."""

import pytest
import torch
from covering import EVERYTHING, covering
from patterns import assert_same_bits, pattern

from iris.errors import ForeignLockValueError
from x import tile_kernels

M, N, BLOCK = 20, 33, (16, 16)
GRID = (2, 3)
# What older programs set; counts of their calls; half of a word of ones; a signal too many.
WRITTEN = [1, 2, 0x7FFF, 1 << 25]
OPERATIONS = ["one_shot", "two_shot", "reduce_scatter", "spinlock"]


def call(ctx, operation, number, src, dst, locks, write=0):
    """One call of every tile, of whole numbers whose sums are exact; ``write``: to each lock before it, if any."""
    values = (pattern((M, N), torch.int8, ctx.cur_rank, number) % 8).to(torch.float32).to(ctx.device)
    tile_kernels.written_lock[GRID](
        ctx.get_device_context(), values, src, dst, locks, M, N, -(-M // ctx.num_ranks), write, operation, *BLOCK
    )
    ctx.barrier()


def expected(ctx, operation, number):
    total = sum((pattern((M, N), torch.int8, rank, number) % 8).to(torch.float32) for rank in range(ctx.num_ranks))
    if operation != "reduce_scatter":
        return total
    rows = -(-M // ctx.num_ranks)
    return total[ctx.cur_rank * rows : (ctx.cur_rank + 1) * rows]


def written(ctx, operation, value, writers, dtype, good_calls):
    src, locks = ctx.zeros(M, N), ctx.zeros(GRID[0] * GRID[1], dtype=dtype)
    dst = ctx.zeros(M, N)
    ctx.barrier()
    for number in range(good_calls):
        dst.zero_()
        ctx.barrier()
        call(ctx, operation, number, src, dst, locks)
    writers = range(ctx.num_ranks) if writers == "all" else [ctx.num_ranks - 1]
    owner = ctx.cur_rank if ctx.cur_rank in writers else writers[-1]
    writes = value if ctx.cur_rank in writers else 0
    if operation == "spinlock":
        # It is told by whom the lock keeps out, who may be anybody and come before it has been written.
        owner = r"\d"
        if writes:
            locks.fill_(value)
        writes = 0
    ctx.barrier()
    for _ in range(2):  # once told, it stays so
        message = rf"Rank {ctx.cur_rank}: .* holds 0x\w+ on rank {owner}, which .* Write nothing to locks: .* zero the"
        with pytest.raises(ForeignLockValueError, match=message):
            call(ctx, operation, good_calls, src, dst, locks, writes)
        writes = 0
    ctx.barrier()
    locks.zero_()
    dst.zero_()
    ctx.barrier()
    call(ctx, operation, good_calls + 1, src, dst, locks)
    right = expected(ctx, operation, good_calls + 1)
    assert_same_bits(dst[: len(right)], right)


@pytest.mark.ranks(*((1, 2, 3, 8) if EVERYTHING else (3,)))
def test_a_lock_that_a_caller_has_written_is_reported_on_every_rank(ranks):
    for case in covering(OPERATIONS, WRITTEN, ["all", "one"], [torch.int32, torch.int64], [0, 2]):
        ranks.run(written, *case)
