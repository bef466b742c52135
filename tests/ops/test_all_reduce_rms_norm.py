"""all_reduce_rms_norm: residual, RMSNorm and fp8 in the all-reduce's pass, against float64."""

import time

import pytest
import torch
import torch.distributed as dist
from covering import EVERYTHING, RANKS, covering

import iris
from iris.ccl import functional as collectives
from iris.ccl.communicator import power_of_two
from iris.ccl.lamport_channel import SLOTS
from iris.errors import InvalidCollectiveError, InvalidGroupError, NotATensorError
from iris.ops import functional, normalisation
from ops.norms import BF16, CLUSTERS, E4M3, E5M2, EPS, FP16, FP32, by, data, expected, inputs, rounds, tolerance

# By the all-reduce's variant: rows and columns. Rows that several programs share, in the first case so that the last
# program gets nothing; more rows than programs, as short as can be; rows whose last part is shorter, and more of them
# than programs; and what is left to an all-reduce and a kernel after it.
SHAPES = [
    ("one_shot", (2, 3000)), ("two_shot_push", (1, 1153)), ("one_shot", (70, 1)), ("two_shot_push", (7, 1111)),
    ("one_shot", (21, 200)), ("two_shot_push", (21, 200)), ("two_shot", (9, 777)),
]  # fmt: skip
RESULTS = [(None, None), (E4M3, "given"), (E4M3, "by row"), (E5M2, None)]


@pytest.mark.ranks(*(RANKS if EVERYTHING else (3,)))
def test_results(ranks):
    for shape, dtype, (out, scaling), *rest in covering(
        SHAPES, [BF16, FP16, FP32], RESULTS, [False, True], CLUSTERS, ranks=ranks
    ):
        ranks.run(rounds, *shape, dtype, out or dtype, scaling, *rest)


def same_bits(ctx):
    """Whatever carries them, and on every rank: sums are in the order of ranks."""
    shape = (2, 3000)
    given, weight = data(ctx.cur_rank, shape, BF16).to(ctx.device), data(99, shape[1:], BF16).to(ctx.device)
    results = []
    for variant in ("one_shot", "two_shot_push"):
        out, x = torch.empty(shape, dtype=BF16, device=ctx.device), data(77, shape, BF16).to(ctx.device)
        with by(ctx, variant):
            ctx.ops.all_reduce_rms_norm(out, given, weight, EPS, residual=x, async_op=True).wait()
        results.append((out.cpu(), x.cpu()))
        for rank in range(ctx.num_ranks):
            assert torch.equal(ctx.broadcast(out, rank).cpu(), out.cpu())
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.ranks(2, 3)
def test_bits_are_the_same_on_all_ranks(ranks):
    ranks.run(same_bits)


def one_after_the_other(ctx, variant, columns, rows, rounds):
    """Calls with other options, numbers of ``rows`` and epsilons, with no meeting of the hosts; in each a rank is late.

    A row's last part is shorter than the others, and what is written there has to go as well.
    """
    weight, wanted = torch.ones(columns, dtype=BF16, device=ctx.device), []
    with by(ctx, variant):
        for call in range(rounds):
            shape = (rows[call // 4 % 4], columns)
            everyone = inputs(ctx, call, shape, BF16)
            by_row, eps = call % 4 == 0, (1, 1e-5)[call % 2]
            out = torch.empty(shape, dtype=E4M3 if by_row else BF16, device=ctx.device)
            row_scales = torch.empty(shape[0], device=ctx.device) if by_row else None
            if call % ctx.num_ranks == ctx.cur_rank:
                time.sleep(0.02)
            given = everyone[ctx.cur_rank].to(ctx.device)
            ctx.ops.all_reduce_rms_norm(out, given, weight, eps, row_scales=row_scales)
            x = sum(each.float() for each in everyone).to(BF16).double()
            wanted.append((x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps), out, row_scales))
    for exact, out, row_scales in wanted:
        factor = 1 if row_scales is None else row_scales.cpu().double()[:, None]
        rtol, atol = tolerance(out.dtype, float(torch.as_tensor(factor).max()))
        torch.testing.assert_close(out.cpu().double() * factor, exact, rtol=rtol, atol=atol)


@pytest.mark.ranks(1, 2, 3, 4, 5) if EVERYTHING else pytest.mark.ranks(2)
@pytest.mark.parametrize("variant", ["one_shot", "two_shot_push"])
def test_calls_of_other_kinds_after_each_other(ranks, variant):
    ranks.run(one_after_the_other, variant, 1056, (1, 3, 1, 4), 48 if EVERYTHING else 16)


def through_the_same_memory(ctx, variant, rounds):
    """Many rows, of which programs have one each or several; here those of any call count as many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(normalisation, "LEAST_AT_A_TIME", 1)
        one_after_the_other(ctx, variant, 248, (1, 21, 3, 70), rounds)
    channels = {name for name, _ in ctx.ccl.communicator().workspace._channels}
    assert sum("rows of 248 " in name and variant in name for name in channels) == 1


@pytest.mark.ranks(1, 2, 3, 4, 5) if EVERYTHING else pytest.mark.ranks(2)
@pytest.mark.parametrize("variant", ["one_shot", "two_shot_push"])
def test_any_number_of_many_rows_goes_through_the_same_memory(ranks, variant):
    ranks.run(through_the_same_memory, variant, 48 if EVERYTHING else 16)


def scales_between_other_calls(ctx, variant):
    """Programs that are no cluster leave each other messages. None is taken for one of as many calls later as slots."""
    shape, weight = (1, 1056), data(99, (1056,), BF16)
    with by(ctx, variant, cluster=1):
        for call, size in enumerate((4, 1)):
            everyone = [size * each for each in inputs(ctx, call, shape, BF16)]
            given, gain = everyone[ctx.cur_rank].to(ctx.device), weight.to(ctx.device)
            narrow, scales = torch.empty(shape, dtype=E4M3, device=ctx.device), torch.empty(1, device=ctx.device)
            ctx.ops.all_reduce_rms_norm(narrow, given, gain, EPS, row_scales=scales)
            for _ in range(SLOTS.value - 1):
                ctx.ops.all_reduce_rms_norm(torch.empty_like(given), given, gain, EPS)
            _, wanted = expected(sum(each.to(FP32) for each in everyone).to(BF16), None, weight)
            largest = wanted.abs().amax(-1) / torch.finfo(E4M3).max
            torch.testing.assert_close(scales.cpu().double(), largest, rtol=1e-5, atol=0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("variant", ["one_shot", "two_shot_push"])
def test_scales_are_of_this_calls_elements(ranks, variant):
    ranks.run(scales_between_other_calls, variant)


def not_numbers(ctx):
    """A NaN or an infinity of one rank is in that row of all ranks, and in no other; in fp8 too."""
    given = torch.ones(3, 300, dtype=BF16, device=ctx.device)
    if ctx.cur_rank == ctx.num_ranks - 1:
        given[0, 7], given[2, 299] = torch.nan, torch.inf
    for variant in ("one_shot", "two_shot_push"):
        out = torch.empty_like(given)
        with by(ctx, variant):
            ctx.ops.all_reduce_rms_norm(out, given, torch.ones(300, dtype=BF16, device=ctx.device))
            narrow = torch.empty(given.shape, dtype=E4M3, device=ctx.device)
            ctx.ops.all_reduce_rms_norm(narrow, given, torch.ones(300, dtype=BF16, device=ctx.device))
            scaled, scales = torch.empty_like(narrow), torch.empty(3, device=ctx.device)
            ctx.ops.all_reduce_rms_norm(
                scaled, given, torch.ones(300, dtype=BF16, device=ctx.device), row_scales=scales
            )
        assert out[0].isnan().all() and out[2, 299].isnan() and (out[2, :299] == 0).all()
        torch.testing.assert_close(out[1], torch.ones_like(out[1]))
        assert narrow.float()[0].isnan().all() and narrow.float()[2, 299].isnan() and (narrow.float()[1] == 1).all()
        assert scaled.float()[[0, 2]].isnan().all() and scales[[0, 2]].isnan().all() and (scaled.float()[1] > 1).all()


def test_what_is_not_a_number(ranks):
    ranks.run(not_numbers)


def in_place(ctx, variant, shape):
    """The input is written over, by the rows that it becomes or by what these are of."""
    everyone = inputs(ctx, 0, shape, FP32)
    total, weight = sum(everyone), data(99, shape[1:], FP32)
    with by(ctx, variant):
        for residual in (None, everyone[ctx.cur_rank]):
            given = everyone[ctx.cur_rank].clone().to(ctx.device)
            out = given if residual is None else torch.empty_like(given)
            added = None if residual is None else given
            ctx.ops.all_reduce_rms_norm(out, given, weight.to(ctx.device), EPS, residual=added)
            wanted_x, wanted = expected(total, residual, weight)
            torch.testing.assert_close(out.cpu().double(), wanted, rtol=1e-5, atol=1e-5)
            if added is not None:
                torch.testing.assert_close(added.cpu().double(), wanted_x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant, shape", SHAPES)
def test_in_place(ranks, variant, shape):
    ranks.run(in_place, variant, shape)


def with_gaps(ctx, variant, shape):
    """Neither the elements of a row of the input nor those of the weight are neighbours in memory."""
    everyone, weight = inputs(ctx, 0, shape, FP32), data(99, shape[1:], FP32)
    given, factors = (x.repeat_interleave(2, -1).to(ctx.device)[..., ::2] for x in (everyone[ctx.cur_rank], weight))
    out = torch.empty(shape, device=ctx.device)
    with by(ctx, variant):
        ctx.ops.all_reduce_rms_norm(out, given, factors, EPS)
    torch.testing.assert_close(out.cpu().double(), expected(sum(everyone), None, weight)[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant, shape", SHAPES)
def test_operands_with_gaps(ranks, variant, shape):
    ranks.run(with_gaps, variant, shape)


def over_what_a_graph_needs(ctx, role):
    """A buffer, a residual or scales that are used again before backward: autograd says so."""
    given = {"out": (4, 12), "residual": (4, 12), "row_scales": (4,)}
    given = {name: torch.ones(shape, device=ctx.device) for name, shape in given.items()}
    loss = (torch.ones(1, device=ctx.device, requires_grad=True) * given[role]).sum()
    rows, weight = torch.ones(4, 12, device=ctx.device), torch.ones(12, device=ctx.device)
    if role == "row_scales":
        given["out"] = given["out"].to(E4M3)
    else:
        del given["row_scales"]
    ctx.ops.all_reduce_rms_norm(given.pop("out"), rows, weight, **given)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("role", ["out", "residual", "row_scales"])
def test_a_result_over_what_a_graph_needs(ranks, role):
    ranks.run(over_what_a_graph_needs, role)


def misuse(ctx):
    x, weight = torch.ones(4, 16, dtype=BF16, device=ctx.device), torch.ones(16, dtype=BF16, device=ctx.device)
    scales = torch.ones(4, device=ctx.device)
    fp8 = torch.empty(4, 16, dtype=E4M3, device=ctx.device)
    whole, long = (torch.ones(shape, dtype=BF16, device=ctx.device) for shape in ((5, 16), (2, 32769)))
    wrong = [
        ("weight has one dimension", (x, x, weight[:8]), {}),
        ("weight has one dimension, .* 1 to 32768", (x[:, :0], x[:, :0], weight[:0]), {}),
        ("weight has one dimension, .* 1 to 32768", (long, long, long[0]), {}),
        ("out has the shape of input", (x[:2], x, weight), {}),
        ("residual has the shape of input, and is contiguous", (x, x, weight), {"residual": x.t().contiguous().t()}),
        ("out and residual overlap in memory", (fresh := torch.empty_like(x), x, weight), {"residual": fresh}),
        ("out and input overlap in memory", (whole[1:], whole[:4], weight), {}),
        ("out and input overlap in memory", (x.view(E4M3)[:2].view(4, 16), x, weight), {}),
        ("residual and input overlap in memory", (fresh, whole[1:], weight), {"residual": whole[:4]}),
        ("out and weight overlap in memory", (whole[:4], x, whole[2]), {}),
        ("are for an out of fp8", (x, x, weight), {"row_scales": scales}),
        ("and not both", (fp8, x, weight), {"row_scales": scales, "scale": scales[:1]}),
        ("one element of float32", (fp8, x, weight), {"scale": scales}),
        ("one element of float32", (fp8, x, weight), {"scale": scales[:1].double()}),
        ("4 contiguous elements of float32", (fp8, x, weight), {"row_scales": scales[:2]}),
        ("4 contiguous elements of float32", (fp8, x, weight), {"row_scales": scales.double()}),
        ("4 contiguous elements of float32", (fp8, x, weight), {"row_scales": scales.repeat(2)[::2]}),
        ("input and weight are fp16, bf16 or fp32", (x, x.int(), weight), {}),
        ("input and weight are fp16, bf16 or fp32", (x, x, weight.double()), {}),
        ("residual is fp16, bf16 or fp32", (x, x, weight), {"residual": x.double()}),
        ("out is fp8, fp16, bf16 or fp32", (x.double(), x, weight), {}),
    ]
    for text, args, options in wrong:
        with pytest.raises(InvalidCollectiveError, match=text):
            ctx.ops.all_reduce_rms_norm(*args, **options)
    with pytest.raises(NotATensorError):
        ctx.ops.all_reduce_rms_norm(x, x, None)
    # Names of groups are kept by their group.
    group = dist.new_group([ctx.cur_rank], use_local_synchronization=True)
    with pytest.raises(InvalidGroupError, match="among all ranks"):
        functional.all_reduce_rms_norm(x, weight, x, EPS, collectives.name_of(ctx, group))
    with pytest.raises(InvalidCollectiveError, match="are for an out of fp8"):
        functional.all_reduce_rms_norm(x, weight, None, EPS, collectives.name_of(ctx), scales[:1])


def test_misuse(ranks):
    ranks.run(misuse)


def with_little_room(ctx):
    """Each shape has memory that is kept. What would be the collectives' is not taken, and the call is right."""
    before = normalisation.ROOM_LEFT
    try:
        for columns, normalisation.ROOM_LEFT in ((1031, before), (1033, 1)):
            rounds(ctx, "one_shot", (16, columns), FP32, FP32, None, True, CLUSTERS[-1])
    finally:
        normalisation.ROOM_LEFT = before
    used = " ".join(ctx.ccl.communicator().workspace.progress())
    assert "16 rows of 1031" in used and "of 1033" not in used


def test_many_shapes_leave_room_for_the_collectives(ranks):
    ranks.run(with_little_room)


def some_at_a_time(ctx, some, rows, columns, *case):
    """There is room for ``some`` rows in one kernel, and not for twice as many."""
    with pytest.MonkeyPatch.context() as patch:
        itemsize = case[0].itemsize
        patch.setattr(normalisation, "LEAST_AT_A_TIME", some * columns * itemsize)
        room = SLOTS.value * some * 3 // 2 * power_of_two(columns) * itemsize
        patch.setattr(normalisation, "SHARE_OF_WORKSPACE", ctx.ccl.communicator().workspace.limit // room)
        rounds(ctx, "one_shot", (rows, columns), *case, CLUSTERS[-1])
    used = " ".join(ctx.ccl.communicator().workspace.progress())
    assert f"{some} rows of {columns} " in used and f"{2 * some} rows of {columns} " not in used


@pytest.mark.ranks(2)
def test_many_rows_are_normalised_some_at_a_time(ranks):
    """In the simulator the last has programs with two rows each."""
    ranks.run(some_at_a_time, 4, 7, 1600, BF16, E4M3, "by row", True)
    ranks.run(some_at_a_time, 4, 8, 1616, FP32, FP32, None, True)
    ranks.run(some_at_a_time, 16, 45, 240, BF16, BF16, None, True)


def by_width(ctx):
    """Of two ranks, whatever the all-reduce takes, unless a program has no room for a row."""
    norms, comm, ways = ctx.ops._all_reduce_rms_norm, ctx.ccl.communicator(), {}
    with by(ctx, "two_shot_push"), pytest.MonkeyPatch.context() as patch:
        patch.delattr(norms, "_variant")
        for columns, dtype in ((8192, BF16), (8193, BF16), (4096, FP32), (4097, FP32)):
            rows = torch.empty(256, columns, dtype=dtype, device=ctx.device)
            ways[columns] = norms._variant(normalisation.NormCall(rows, rows, rows[0], None, None, None))
    assert comm.size == 2
    assert ways == {8192: "one_shot", 8193: "two_shot_push", 4096: "one_shot", 4097: "two_shot_push"}


@pytest.mark.ranks(2)
def test_two_ranks_take_one_shot_unless_rows_are_too_wide(ranks):
    ranks.run(by_width)


def decided_at_first(ctx):
    """Shapes whose room changes before rank 0 has an input that lies otherwise, and prepares a launch of its own."""
    with iris.iris(1 << 20) as own, pytest.MonkeyPatch.context() as patch, by(own, "one_shot"):
        workspace, some, none = own.ccl.communicator().workspace, normalisation.ROOM_LEFT, 1
        for columns, *rooms in ((1031, some, none), (1033, none, some)):
            everyone, weight = inputs(own, 0, (3, columns), FP32), data(99, (columns,), FP32).to(own.device)
            for call, left in enumerate(rooms):
                patch.setattr(normalisation, "ROOM_LEFT", left)
                begin = call if own.cur_rank == 0 else 0
                given = torch.empty(3 * columns + 1, device=own.device)[begin:][: 3 * columns].view(3, columns)
                given.copy_(everyone[own.cur_rank])
                out = torch.empty_like(given)
                own.ops.all_reduce_rms_norm(out, given, weight, EPS)
                wanted = expected(sum(everyone), None, weight.cpu())[1]
                torch.testing.assert_close(out.cpu().double(), wanted, rtol=1e-5, atol=1e-5)
        used = " ".join(workspace.progress())
    assert "of 1031" in used and "of 1033" not in used


@pytest.mark.ranks(2)
def test_the_first_call_of_a_shape_decides_for_all_that_follow(ranks):
    ranks.run(decided_at_first)
