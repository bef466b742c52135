"""all_reduce_rms_norm whose residual is kept by the ranks that own its rows: the same bits as with a whole one."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from covering import EVERYTHING, RANKS, covering
from patterns import assert_same_bits
from rank_pool import Hosts, needs_gloo

import iris
from iris.errors import GroupAbortedError, InvalidCollectiveError, UnknownChoiceError
from iris.ops.normalisation import AllReduceRmsNorm
from ops.norms import BF16, E4M3, EPS, FP16, FP32, by, data, inputs

# Rows of each rank, and columns: the second are nowhere aligned.
SHAPES = [(2, 300), (3, 1153), (1, 8)]


def result(ctx, layout, round, shape, dtype, out_dtype, scaling, adds, in_place):
    """Rows, their factors, and this rank's rows of the residual."""
    given = inputs(ctx, round, shape, dtype)[ctx.cur_rank].to(ctx.device)
    out = given if in_place else torch.empty(shape, dtype=out_dtype, device=ctx.device)
    weight, residual = data(99, shape[-1:], dtype).to(ctx.device), None
    if adds:
        residual = data(77 + round, shape, FP32).to(ctx.device)
        residual = residual[ctx.cur_rank].clone() if layout == "sharded" else residual
    scale = torch.tensor([0.25], device=ctx.device) if scaling == "given" else None
    factors = torch.empty(shape[:2], device=ctx.device) if scaling == "by row" else None
    # Behind an all-reduce, whose kernel is the same.
    with by(ctx, "two_shot"):
        ctx.ops.all_reduce_rms_norm(
            out, given, weight, EPS, residual=residual, scale=scale, row_scales=factors, residual_layout=layout
        )
    return out, factors, residual if residual is None or layout == "sharded" else residual[ctx.cur_rank]


def same_as_whole(ctx, cases):
    for round, ((each, columns), dtype, (out_dtype, scaling), adds, in_place) in enumerate(cases):
        case = (ctx.num_ranks, each, columns), dtype, out_dtype or dtype, scaling, adds, in_place and not out_dtype
        of_layouts = (result(ctx, layout, round, *case) for layout in ("replicated", "sharded"))
        for whole, sharded in zip(*of_layouts, strict=True):
            if whole is not None:
                assert_same_bits(sharded, whole)


@pytest.mark.ranks(*(*RANKS, Hosts(2, 2)) if EVERYTHING else (1, 3))
def test_the_bits_are_those_of_a_whole_residual(ranks):
    results = [(None, None), (E4M3, "by row"), (E4M3, "given")]
    ranks.run(same_as_whole, list(covering(SHAPES, [BF16, FP16, FP32], results, [True, False], [False, True])))


def refused(ctx):
    def call(residual, input, **options):
        options = {"residual_layout": "sharded"} | options
        out, weight = torch.empty_like(input), input.new_ones(8)
        ctx.ops.all_reduce_rms_norm(out, input, weight, residual=residual, **options)

    x = torch.ones(ctx.num_ranks, 2, 8, device=ctx.device)
    whole = x.clone()
    with pytest.raises(InvalidCollectiveError, match=r"sharded has shape \[2, 8\], and is contiguous"):
        call(whole, x)
    # On all ranks or on none: rank 0's rows begin where the input does.
    for rank in (0, ctx.cur_rank):
        with pytest.raises(InvalidCollectiveError, match="residual and input overlap in memory"):
            call(x[rank], x)
    if ctx.num_ranks > 1:
        with pytest.raises(InvalidCollectiveError, match="2 ranks cannot own equal parts of 3 rows"):
            call(None, torch.ones(3, 8, device=ctx.device))
    with pytest.raises(InvalidCollectiveError, match="residual has the shape of input"):
        call(whole[0], x, residual_layout="replicated")
    with pytest.raises(UnknownChoiceError, match="residual_layout='rows'.*'replicated', 'sharded'"):
        call(whole, x, residual_layout="rows")


@pytest.mark.ranks(1, 2, exactly=True)
def test_a_residual_of_another_shape_is_refused(ranks):
    ranks.run(refused)


def fail_between(ctx):
    """Rank 1 has its sums, and no kernel to normalise them. It stays, and the other host waits in the all_gather."""

    def refuse(*_):
        raise MemoryError("no room for a kernel")

    with iris.iris(1 << 20) as other:
        x, here = torch.ones(4, 8, device=other.device), other.cur_rank == 1
        with mock.patch.object(AllReduceRmsNorm, "_of_sums", refuse) if here else contextlib.nullcontext():
            with pytest.raises(MemoryError if here else GroupAbortedError, match="no room for a kernel"):
                other.ops.all_reduce_rms_norm(torch.empty_like(x), x, x[0].clone(), residual_layout="sharded")
        dist.barrier()


@needs_gloo
@pytest.mark.ranks(Hosts(2, 1))
def test_an_error_between_its_steps_is_told_to_other_hosts(ranks, mistaken):
    ranks.run(fail_between)
