"""all_reduce_rms_norm whose residual is kept by the ranks that own its rows: the same bits as with a whole one."""

import pytest
import torch
from covering import EVERYTHING, RANKS, covering
from patterns import assert_same_bits
from rank_pool import Hosts

from iris.errors import InvalidCollectiveError, UnknownChoiceError
from ops.norms import BF16, E4M3, EPS, FP16, FP32, by, data, inputs

# Rows of each rank, and columns: the second are nowhere aligned.
SHAPES = [(2, 300), (3, 1153), (1, 8)]


def result(ctx, layout, round, shape, dtype, out_dtype, scaling, adds, in_place):
    """Rows, their factors, and this rank's rows of the residual."""
    given = inputs(ctx, round, shape, dtype)[ctx.cur_rank].to(ctx.device)
    out = given if in_place else torch.empty(shape, dtype=out_dtype, device=ctx.device)
    weight, residual = data(99, shape[1:], dtype).to(ctx.device), None
    each = shape[0] // ctx.num_ranks
    mine = slice(ctx.cur_rank * each, (ctx.cur_rank + 1) * each)
    if adds:
        residual = data(77 + round, shape, FP32).to(ctx.device)
        residual = residual[mine].clone() if layout == "sharded" else residual
    scale = torch.tensor([0.25], device=ctx.device) if scaling == "given" else None
    factors = torch.empty(shape[0], device=ctx.device) if scaling == "by row" else None
    # Behind an all-reduce, whose kernel is the same.
    with by(ctx, "two_shot"):
        ctx.ops.all_reduce_rms_norm(
            out, given, weight, EPS, residual=residual, scale=scale, row_scales=factors, residual_layout=layout
        )
    return out, factors, residual if residual is None or layout == "sharded" else residual[mine]


def same_as_whole(ctx, cases):
    for round, ((each, columns), dtype, (out_dtype, scaling), adds, in_place) in enumerate(cases):
        case = (each * ctx.num_ranks, columns), dtype, out_dtype or dtype, scaling, adds, in_place and not out_dtype
        of_layouts = (result(ctx, layout, round, *case) for layout in ("replicated", "sharded"))
        for whole, sharded in zip(*of_layouts, strict=True):
            if whole is not None:
                assert_same_bits(sharded, whole)


@pytest.mark.ranks(*(*RANKS, Hosts(2, 2)) if EVERYTHING else (3,))
def test_the_bits_are_those_of_a_whole_residual(ranks):
    results = [(None, None), (E4M3, "by row"), (E4M3, "given")]
    ranks.run(same_as_whole, list(covering(SHAPES, [BF16, FP16, FP32], results, [True, False], [False, True])))


def refused(ctx):
    def call(residual, rows=4, **options):
        x = torch.ones(rows, 8, device=ctx.device)
        options = {"residual_layout": "sharded"} | options
        ctx.ops.all_reduce_rms_norm(x, x, x[0].clone(), residual=residual, **options)

    whole = torch.ones(4, 8, device=ctx.device)
    with pytest.raises(InvalidCollectiveError, match=r"sharded has shape \[2, 8\], and is contiguous"):
        call(whole)
    with pytest.raises(InvalidCollectiveError, match="2 ranks cannot own equal parts of 3 rows"):
        call(None, rows=3)
    with pytest.raises(InvalidCollectiveError, match="residual has the shape of input"):
        call(whole[:2], residual_layout="replicated")
    with pytest.raises(UnknownChoiceError, match="residual_layout='rows'.*'replicated', 'sharded'"):
        call(whole, residual_layout="rows")


@pytest.mark.ranks(2, exactly=True)
def test_a_residual_of_another_shape_is_refused(ranks):
    ranks.run(refused)
