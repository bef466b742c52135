"""NaNs, infinities and zeros in sums, minima and maxima: as torch has them, and the same bits on all ranks."""

import itertools

import pytest
import torch
from covering import thorough
from patterns import assert_same_bits

from ccl.calls import mainly
from iris.ccl import Config, ReduceOp

INF, NAN = float("inf"), float("nan")


def special_values(ctx, variant):
    """The sign of zero is as in IEEE 754."""
    config = Config(all_reduce_variant=variant)
    rows = torch.tensor([[NAN, 1, INF, -INF, -0.0, INF], [2, NAN, INF, -INF, -0.0, -INF]], device=ctx.device)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        everyone = torch.stack([rows[rank % 2] for rank in range(ctx.num_ranks)]).to(dtype)
        given, result = everyone[ctx.cur_rank], ctx.empty(6, dtype=dtype)
        for op, expected in [
            (ReduceOp.SUM, sum(everyone[1:], everyone[0])),
            (ReduceOp.MIN, everyone.amin(0)),
            (ReduceOp.MAX, everyone.amax(0)),
        ]:
            ctx.ccl.all_reduce(result, given, op=op, config=config)
            torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
            assert result[4].signbit() == expected[4].signbit()
        if dtype.itemsize < 4:
            continue
        # Each rank has another NaN, or one of all ones, which travels as another. They become the same bits on all,
        # also where nothing is rounded, and where a rank gets them otherwise, as its result is not on the heap.
        bits = {4: torch.int32, 8: torch.int64}[dtype.itemsize]
        nans = torch.full((6,), NAN, dtype=dtype, device=ctx.device).view(bits) + 1 + ctx.cur_rank
        away = torch.empty_like(given) if ctx.cur_rank == ctx.num_ranks - 1 else result
        for op, given, out in itertools.product((ReduceOp.SUM, ReduceOp.MAX), (nans, nans * 0 - 1), (result, away)):
            ctx.ccl.all_reduce(out, given.view(dtype), op=op, config=config)
            assert out.isnan().all()
            for rank in range(ctx.num_ranks):
                assert_same_bits(ctx.broadcast(out, rank), out)


# Elements that are their own flags, and blocks that have one.
@mainly(2, 3)
@pytest.mark.parametrize("variant", ["one_shot", thorough("two_shot_push"), "two_shot_direct", "two_shot"])
def test_special_values(ranks, variant):
    if ranks.num_ranks > 1:
        ranks.run(special_values, variant)
