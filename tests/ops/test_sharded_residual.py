"""all_reduce_rms_norm whose residual is kept by the ranks that own its rows: in one kernel, or in three steps."""

import contextlib
import random
import re
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from covering import EVERYTHING, RANKS, covering, thorough
from hesitation import hesitant
from patterns import assert_same_bits
from rank_pool import Hosts, needs_gloo

import iris
from iris.ccl.lamport_channel import SLOTS
from iris.errors import GroupAbortedError, InvalidCollectiveError, UnknownChoiceError
from iris.ops import normalisation
from iris.ops.normalisation import AllReduceRmsNorm
from ops.norms import BF16, CLUSTERS, E4M3, E5M2, EPS, FP16, FP32, by, data, inputs, rounds, tolerance

# Rows of each rank, and columns: the second are nowhere aligned.
SHAPES = [(2, 300), (3, 1153), (1, 8)]
RESULTS = [(None, None), (E4M3, "by row"), (E4M3, "given"), (E5M2, None)]


def in_one_kernel(ctx, each, columns, *case):
    """Rows that several programs share, and more rows than programs; twice, or each slot and one again."""
    rounds(ctx, "two_shot", (ctx.num_ranks * each, columns), *case, layout="sharded")
    # Of float32 a thread has no registers for the parts of five ranks and more.
    if ctx.num_hosts == 1 and 1 < ctx.num_ranks <= (4 if case[0] is FP32 else 8):
        said = " ".join(ctx.ccl.communicator().workspace.progress())
        assert re.search(rf"of {columns} {case[0]} in \d+ pieces by owners", said)


@pytest.mark.ranks(*(RANKS if EVERYTHING else (3,)))
def test_results(ranks):
    shapes = [(1, 3000), (2, 1153), (21, 200), (5, 1)]
    for shape, dtype, (out, scaling), *rest in covering(
        shapes, [BF16, FP16, FP32], RESULTS, [False, True], CLUSTERS, ranks=ranks
    ):
        ranks.run(in_one_kernel, *shape, dtype, out or dtype, scaling, *rest)


def some_at_a_time(ctx):
    """There is room for 4 rows of each rank in one kernel, and not for 8."""
    columns = 1648
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(normalisation, "LEAST_AT_A_TIME", 4 * ctx.num_ranks * columns * BF16.itemsize)
        of_six = 6 * SLOTS.value * (2 * ctx.num_ranks - 1) * columns * BF16.itemsize
        patch.setattr(normalisation, "SHARE_OF_WORKSPACE", ctx.ccl.communicator().workspace.limit // of_six)
        in_one_kernel(ctx, 7, columns, BF16, BF16, None, True, CLUSTERS[-1])
        patch.setattr(normalisation, "SHARE_OF_WORKSPACE", ctx.ccl.communicator().workspace.limit // (of_six * 3 // 4))
        in_one_kernel(ctx, 7, columns, BF16, E4M3, "by row", True, CLUSTERS[-1])
    assert f"8 rows of {columns} " not in " ".join(ctx.ccl.communicator().workspace.progress())


@pytest.mark.ranks(2)
def test_many_rows_are_normalised_some_at_a_time(ranks):
    ranks.run(some_at_a_time)


def same_bits(ctx):
    """On all ranks, and where the rows are written over what they are of."""
    shape, weight = (3 * ctx.num_ranks, 1153), data(99, (1153,), BF16).to(ctx.device)
    given = data(ctx.cur_rank, shape, BF16).to(ctx.device)
    out = torch.empty_like(given)
    for result in (out, given):
        ctx.ops.all_reduce_rms_norm(result, given, weight, EPS, residual_layout="sharded")
    assert_same_bits(given, out)
    for rank in range(ctx.num_ranks):
        assert_same_bits(ctx.broadcast(out, rank), out)


@pytest.mark.ranks(*(2, 3) if EVERYTHING else (3,))
def test_bits_are_the_same_on_all_ranks(ranks):
    ranks.run(same_bits)


def one_after_the_other(ctx, calls, columns=1056, rows=(1, 3, 1, 4)):
    """Calls of other kinds, layouts and numbers of rows, with no meeting of the hosts; in each a rank is late."""
    weight, wanted = torch.ones(columns, dtype=BF16, device=ctx.device), []
    with hesitant(ctx, random.Random(ctx.cur_rank), chance=0.03):
        for call in range(calls):
            shape = (rows[call // 4 % 4] * ctx.num_ranks, columns)
            # With an eps as large as this, a row's factor is larger from call to call.
            everyone = [each * (1 + 3 * call) for each in inputs(ctx, call, shape, BF16)]
            by_row, eps = call % 4 > 0, (1e4, 2e4)[call % 2]
            out = torch.empty(shape, dtype=E4M3 if by_row else BF16, device=ctx.device)
            factors = torch.empty(shape[0], device=ctx.device) if by_row else None
            if call % ctx.num_ranks == ctx.cur_rank:
                time.sleep(0.02)
            given, layout = everyone[ctx.cur_rank].to(ctx.device), "replicated" if call % 5 == 4 else "sharded"
            ctx.ops.all_reduce_rms_norm(out, given, weight, eps, row_scales=factors, residual_layout=layout)
            x = sum(each.float() for each in everyone).to(BF16).double()
            wanted.append((x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps), out, factors))
    for exact, out, factors in wanted:
        factor = 1 if factors is None else factors.cpu().double()[:, None]
        rtol, atol = tolerance(out.dtype, float(torch.as_tensor(factor).max()))
        torch.testing.assert_close(out.cpu().double() * factor, exact, rtol=rtol, atol=atol)


@pytest.mark.ranks(2, 3, 4, 5) if EVERYTHING else pytest.mark.ranks(2)
@pytest.mark.parametrize("calls", [12, thorough(48)])
def test_calls_of_other_kinds_after_each_other(ranks, calls):
    ranks.run(one_after_the_other, calls)


def through_the_same_memory(ctx, calls):
    """Many rows, of which programs have one each or several; here those of any call count as many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(normalisation, "LEAST_AT_A_TIME", 1)
        one_after_the_other(ctx, calls, 248, (1, 21, 3, 70))
    channels = {name for name, _ in ctx.ccl.communicator().workspace._channels}
    # With factors and without, which is another channel.
    of_owners = [name for name in channels if "rows of 248 " in name and "by owners" in name]
    assert ["row_scales" in name for name in sorted(of_owners, key=len)] == [False, True]


@pytest.mark.ranks(2, 3, 4, 5) if EVERYTHING else pytest.mark.ranks(2)
@pytest.mark.parametrize("calls", [20, thorough(48)])
def test_any_number_of_many_rows_goes_through_the_same_memory(ranks, calls):
    ranks.run(through_the_same_memory, calls)


def not_numbers(ctx):
    """A NaN or an infinity of one rank is in that row of all ranks, and in no other."""
    given, weight = (
        torch.ones(3 * ctx.num_ranks, 300, dtype=BF16, device=ctx.device),
        torch.ones(300, device=ctx.device),
    )
    if ctx.cur_rank == 0:
        given[-1, 7], given[1, 299] = torch.nan, torch.inf
    out, narrow = torch.empty_like(given), torch.empty(given.shape, dtype=E4M3, device=ctx.device)
    factors = torch.empty(len(given), device=ctx.device)
    ctx.ops.all_reduce_rms_norm(out, given, weight, residual_layout="sharded")
    ctx.ops.all_reduce_rms_norm(narrow, given, weight, row_scales=factors, residual_layout="sharded")
    assert out[-1].isnan().all() and out[1, 299].isnan() and (out[1, :299] == 0).all()
    assert narrow.float()[[1, -1]].isnan().all() and factors[[1, -1]].isnan().all()
    assert not any(each[[0, *range(2, len(each) - 1)]].float().isnan().any() for each in (out, narrow, factors))


def test_what_is_not_a_number(ranks):
    ranks.run(not_numbers)


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
    # After a collective, each by the same kernel.
    with by(ctx, "two_shot"), mock.patch.object(AllReduceRmsNorm, "_in_one_kernel", lambda *_: None):
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
def test_in_three_steps_the_bits_are_those_of_a_whole_residual(ranks):
    ranks.run(same_as_whole, list(covering(SHAPES, [BF16, FP16, FP32], RESULTS, [True, False], [False, True])))


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
