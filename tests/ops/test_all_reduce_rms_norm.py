"""all_reduce_rms_norm: residual, RMSNorm and fp8 in the all-reduce's pass, against float64."""

import contextlib
import time
from itertools import product

import pytest
import torch
import torch.distributed as dist
from covering import EVERYTHING, covering

from iris.ccl import communicator
from iris.ccl import functional as collectives
from iris.ccl.push import SLOTS
from iris.errors import InvalidCollectiveError, InvalidGroupError, NotATensorError
from iris.language.target import largest_cluster, threads_per_warp
from iris.ops import functional, normalisation

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
EPS = 1e-5
# By the all-reduce's variant: rows and columns. Rows that several programs share, in the first case so that the last
# program gets nothing; more rows than programs, as short as can be; rows whose last part is shorter, and more of them
# than programs; and what is left to an all-reduce and a kernel behind it.
SHAPES = [
    ("one_shot", (2, 3000)), ("two_shot_push", (1, 1153)), ("one_shot", (70, 1)), ("two_shot_push", (7, 1111)),
    ("two_shot_push", (21, 200)), ("two_shot", (9, 777)),
]  # fmt: skip
# Programs of a cluster at most: 1 is for GPUs without.
CLUSTERS = sorted({1, largest_cluster()})
CASES = [
    (*shape, dtype, out or dtype, scaling, adds, cluster)
    for shape, dtype, (out, scaling), adds, cluster in covering(
        SHAPES,
        [BF16, FP16, FP32],
        [(None, None), (E4M3, "given"), (E4M3, "by row"), (E5M2, None)],
        [False, True],
        CLUSTERS,
    )
]


def data(seed, shape, dtype):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=FP32).to(dtype)


def inputs(ctx, round, shape, dtype):
    """Of every rank."""
    return [data(1000 * round + rank, shape, dtype) for rank in range(ctx.num_ranks)]


def expected(total, residual, weight):
    """``x`` and its normalised rows, in float64."""
    x = total.double() + (0 if residual is None else residual.double())
    return x, x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.double()


@contextlib.contextmanager
def by(ctx, variant, cluster=CLUSTERS[-1]):
    """All sums by one variant of the all-reduce, and with so many programs in a cluster."""
    comm = ctx.ccl.communicator()
    table, largest = comm.table, comm.largest_cluster
    comm.largest_cluster = cluster
    comm.table = table | {"all_reduce": [table["all_reduce"][0]._replace(limit=None, variant=variant, programs=None)]}
    comm.forget()
    ctx.ops._all_reduce_rms_norm._launches.clear()
    try:
        yield
    finally:
        comm.table, comm.largest_cluster = table, largest
        comm.forget()
        ctx.ops._all_reduce_rms_norm._launches.clear()


def tolerance(dtype, scale):
    """Relative and absolute: half a unit of the last place, what float32 adds, and the least numbers of fp8."""
    least = {E4M3: 2**-10, E5M2: 2**-17}.get(dtype, 0)
    return torch.finfo(dtype).eps / 2 + 1e-5, least * scale + 1e-6


def rounds(ctx, variant, shape, dtype, out_dtype, scaling, adds, cluster):
    out = torch.empty(shape, dtype=out_dtype, device=ctx.device)
    weight = data(99, shape[1:], dtype)
    scale = torch.tensor([0.25], device=ctx.device) if scaling == "given" else None
    row_scales = torch.empty(shape[0], device=ctx.device) if scaling == "by row" else None
    with by(ctx, variant, cluster):
        for round in range(SLOTS.value + 1):  # each slot, and one again
            everyone = inputs(ctx, round, shape, dtype)
            residual = data(77 + round, shape, dtype) if adds else None
            given = everyone[ctx.cur_rank].to(ctx.device)
            x = residual.clone().to(ctx.device) if adds else None
            ctx.ops.all_reduce_rms_norm(
                out, given, weight.to(ctx.device), EPS, residual=x, scale=scale, row_scales=row_scales
            )
            # The sum is rounded as an all-reduce's is.
            total = sum(each.to(FP32) for each in everyone).to(dtype)
            wanted_x, wanted = expected(total, residual, weight)
            if adds:
                torch.testing.assert_close(x.cpu().double(), wanted_x, rtol=torch.finfo(dtype).eps, atol=1e-6)
            factor = 1.0
            if scale is not None:
                factor = 0.25
            if row_scales is not None:
                factor = row_scales.cpu().double()[:, None]
                # A row of zeros has a scale that divides.
                largest = (wanted.abs().amax(-1, keepdim=True) / torch.finfo(out_dtype).max).clamp(min=1e-12)
                torch.testing.assert_close(factor, largest, rtol=1e-5, atol=0)
            rtol, atol = tolerance(out_dtype, float(torch.as_tensor(factor).max()))
            torch.testing.assert_close(out.cpu().double() * factor, wanted, rtol=rtol, atol=atol)


@pytest.mark.ranks(1, 2, 3, 4) if EVERYTHING else pytest.mark.ranks(3)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_results(ranks, case):
    ranks.run(rounds, *CASES[case])


def same_bits(ctx):
    """Whatever carries them, and on every rank: sums are in the order of ranks."""
    shape = (2, 3000)
    given, weight = data(ctx.cur_rank, shape, BF16).to(ctx.device), data(99, shape[1:], BF16).to(ctx.device)
    results = []
    for variant in ("one_shot", "two_shot_push"):
        out, x = torch.empty(shape, dtype=BF16, device=ctx.device), data(77, shape, BF16).to(ctx.device)
        with by(ctx, variant):
            ctx.ops.all_reduce_rms_norm(out, given, weight, EPS, residual=x)
        results.append((out.cpu(), x.cpu()))
        for rank in range(ctx.num_ranks):
            assert torch.equal(ctx.broadcast(out, rank).cpu(), out.cpu())
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.ranks(2, 3)
def test_bits_are_the_same_on_all_ranks(ranks):
    ranks.run(same_bits)


def one_after_the_other(ctx, variant, rounds):
    """Calls with other options, numbers of rows and epsilons, with no meeting of the hosts; in each a rank is late.

    A row's last part is shorter than the others, and what is written there has to go as well.
    """
    columns, weight = 1056, torch.ones(1056, dtype=BF16, device=ctx.device)
    wanted = []
    with by(ctx, variant):
        for call in range(rounds):
            shape = ((1, 3, 1, 4)[call // 4 % 4], columns)
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


@pytest.mark.ranks(1, 2, 3, 4, 5) if EVERYTHING else pytest.mark.ranks(3)
@pytest.mark.parametrize("variant", ["one_shot", "two_shot_push"])
def test_calls_of_other_kinds_behind_each_other(ranks, variant):
    ranks.run(one_after_the_other, variant, 48 if EVERYTHING else 24)


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


def gradients(ctx, adds):
    """Of the sum of all ranks' results, against autograd in float64 with every rank's input at hand."""
    shape = (3, 40)
    everyone = [each.double().requires_grad_() for each in inputs(ctx, 0, shape, FP32)]
    residual, weight = (
        data(seed, size, FP32).double().requires_grad_() for seed, size in ((77, shape), (99, shape[1:]))
    )
    x, out = expected(sum(everyone), residual if adds else None, weight)
    of_out, of_x = data(5, shape, FP32), data(6, shape, FP32)
    (ctx.num_ranks * (out * of_out + (x * of_x if adds else 0)).sum()).backward()

    given, added, gain = (
        each.detach().float().to(ctx.device).requires_grad_() for each in (everyone[ctx.cur_rank], residual, weight)
    )
    y, total = functional.all_reduce_rms_norm(given, gain, added if adds else None, EPS, collectives.name_of(ctx))
    ((y * of_out.to(ctx.device)).sum() + ((total * of_x.to(ctx.device)).sum() if adds else 0)).backward()
    torch.testing.assert_close(given.grad.cpu(), everyone[ctx.cur_rank].grad.float())
    # Each rank has a residual and a weight of its own.
    for mine, theirs in ((added, residual), (gain, weight))[not adds :]:
        torch.testing.assert_close(mine.grad.cpu(), (theirs.grad / ctx.num_ranks).float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("adds", [True, False])
def test_gradients(ranks, adds):
    ranks.run(gradients, adds)


def forms(ctx, compiler):
    """One row, a residual that lies otherwise in memory or none, and traced by torch.compile."""
    ranks = collectives.name_of(ctx)
    weight = torch.rand(12, device=ctx.device)

    def norm(given, residual, dtype=None):
        return functional.all_reduce_rms_norm(given, weight, residual, EPS, ranks, dtype=dtype)

    call = torch.compile(norm, backend=compiler, fullgraph=True) if compiler else norm
    for shape in ((12,), (5, 12)):
        given = data(ctx.cur_rank, shape, BF16).to(ctx.device).requires_grad_()
        residual = (
            torch.rand(shape[::-1], device=ctx.device).t() if len(shape) > 1 else torch.rand(12, device=ctx.device)
        )
        total = sum(data(rank, shape, BF16).float() for rank in range(ctx.num_ranks)).to(BF16).float().to(ctx.device)
        wanted, bare = (torch.nn.functional.rms_norm(x, (12,), weight, EPS) for x in (total + residual, total))
        out, x = call(given, residual)
        torch.testing.assert_close(out, wanted.to(BF16))
        torch.testing.assert_close(x, total + residual)
        out.float().sum().backward()
        assert given.grad.shape == shape
        out, x = call(given, None, FP32)
        torch.testing.assert_close(out, bare)
        assert x.shape == (0,)


COMPILERS = [None, "aot_eager", *(["inductor"] if EVERYTHING else [])]


@pytest.mark.parametrize("compiler", COMPILERS)
def test_forms(ranks, compiler):
    ranks.run(forms, compiler)


def fp8_forms(ctx, compiler):
    """By a scale that is given, or by one a row, which multiplies what is left; traced as one graph."""
    ranks, shape = collectives.name_of(ctx), (2, 3, 48)
    given, residual, weight = (data(seed, size, BF16) for seed, size in ((0, shape), (7, shape), (9, shape[2:])))
    total = given.float() * ctx.num_ranks
    scale = torch.tensor([0.25], device=ctx.device)

    def by_scale(given, residual, weight):
        out, x = functional.all_reduce_rms_norm(given * 1, weight, residual, EPS, ranks, scale, E4M3)
        return out, x, scale.expand(2, 3, 1) * 1

    def by_row(given, residual, weight):
        return functional.all_reduce_rms_norm_by_row(given * 1, weight, residual, EPS, ranks, E4M3)

    mine = [each.to(ctx.device) for each in (given, residual, weight)]
    for function in (by_scale, by_row):
        call = torch.compile(function, backend=compiler, fullgraph=True) if compiler else function
        for added in (mine[1], None):
            wanted_x, wanted = expected(total.to(BF16), None if added is None else residual, weight)
            out, x, scales = call(mine[0], added, mine[2])
            assert (out.dtype, scales.dtype, scales.shape) == (E4M3, FP32, (2, 3, 1))
            if added is None:
                assert x.shape == (0,)
            else:
                torch.testing.assert_close(x.cpu().double(), wanted_x, rtol=torch.finfo(BF16).eps, atol=1e-6)
            if function is by_row:
                largest = wanted.abs().amax(-1, keepdim=True) / torch.finfo(E4M3).max
                torch.testing.assert_close(scales.cpu().double(), largest, rtol=1e-5, atol=0)
            rtol, atol = tolerance(E4M3, scales.max().item())
            torch.testing.assert_close(out.cpu().double() * scales.cpu().double(), wanted, rtol=rtol, atol=atol)
        with pytest.raises(InvalidCollectiveError, match="rows of torch.float8_e4m3fn have no gradient"):
            function(mine[0], mine[1], mine[2].clone().requires_grad_())


@pytest.mark.parametrize("compiler", COMPILERS)
def test_forms_of_fp8(ranks, compiler):
    ranks.run(fp8_forms, compiler)


def registered(ctx):
    ranks, x = collectives.name_of(ctx), data(ctx.cur_rank, (4, 16), BF16).to(ctx.device)
    weight, scale = torch.ones(16, dtype=BF16, device=ctx.device), torch.ones(1, device=ctx.device)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for residual in (x.clone(), None):
        given = (x, weight, residual, EPS, ranks)
        for operator, rest in (
            (functional.all_reduce_rms_norm, ()),
            (functional.all_reduce_rms_norm, (scale, E4M3)),
            (functional.all_reduce_rms_norm_by_row, (E4M3,)),
        ):
            torch.library.opcheck(operator, (*given, *rest), test_utils=checks)


def test_registrations(ranks):
    ranks.run(registered)


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


def misuse(ctx):
    x, weight = torch.ones(4, 16, dtype=BF16, device=ctx.device), torch.ones(16, dtype=BF16, device=ctx.device)
    scales = torch.ones(4, device=ctx.device)
    fp8 = torch.empty(4, 16, dtype=E4M3, device=ctx.device)
    whole = torch.ones(5, 16, dtype=BF16, device=ctx.device)
    wrong = [
        ("weight has one dimension", (x, x, weight[:8]), {}),
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
        ("4 contiguous elements of float32", (fp8, x, weight), {"row_scales": scales[:2]}),
        ("fp16, bf16 or fp32", (x, x.int(), weight), {}),
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


def beyond_the_row(ctx, cluster):
    """Pieces so small that what they are rounded up by is more than one of them."""
    columns, sms = 200, ctx.get_cu_count() if torch.cuda.is_available() else None
    before = normalisation.SMALLEST_PIECE, normalisation.SMALLEST_PART
    normalisation.SMALLEST_PIECE, normalisation.SMALLEST_PART = 16, 8
    try:
        division = normalisation.divide("two_shot_push", ctx.num_ranks, 1, columns, 2, sms, cluster)
        assert (division.pieces - 1) * ctx.num_ranks * division.part >= columns
        rounds(ctx, "two_shot_push", (1, columns), BF16, BF16, None, True, cluster)
    finally:
        normalisation.SMALLEST_PIECE, normalisation.SMALLEST_PART = before


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_program_may_have_nothing_of_its_row(ranks, cluster):
    ranks.run(beyond_the_row, cluster)


SMS = 132  # of an H200


def test_programs_that_wait_for_each_other_all_have_a_place():
    """Those of the other ranks wait for all of them, and those of a row for each other."""
    for variant, size, room, columns, itemsize, cluster in product(
        ("one_shot", "two_shot_push"), (1, 2, 3, 5, 6, 7, 8, 12), (1, 2, 16, 64, 1024),
        (1, 300, 4096, 5000, 16384, 32768), (2, 4), (1, 8, 16),
    ):  # fmt: skip
        division = normalisation.divide(variant, size, room, columns, itemsize, SMS, cluster)
        ranks = 1 if variant == "one_shot" else size
        assert division.pieces * ranks * division.part >= columns
        assert division.piece >= ranks * division.part and division.block >= division.part
        assert division.part * itemsize % 16 == 0 and division.warps & (division.warps - 1) == 0
        # Each thread polls a word.
        assert division.block * itemsize >= 4 * threads_per_warp() * division.warps
        if division.pieces > 1:
            assert room * division.pieces * division.warps <= normalisation.WARPS * SMS
        if division.clustered:
            assert 1 < division.pieces <= cluster and division.warps <= normalisation.CLUSTER_WARPS
            held = division.piece * itemsize * max(4, size if variant == "one_shot" else 1)
            assert held <= division.warps * threads_per_warp() * normalisation.CLUSTER_BYTES


@pytest.mark.parametrize(
    "variant, size, room, columns, pieces, warps, clustered",
    [
        ("one_shot", 4, 1, 4096, 16, 1, True), ("one_shot", 4, 16, 8192, 16, 1, True),
        ("one_shot", 6, 1, 16384, 16, 2, True), ("one_shot", 8, 1, 32768, 128, 1, False),
        ("two_shot_push", 2, 32, 8192, 16, 1, True), ("two_shot_push", 4, 32, 4096, 8, 1, True),
        ("two_shot_push", 5, 32, 4096, 4, 2, True), ("two_shot_push", 4, 128, 8192, 4, 2, True),
        ("two_shot_push", 4, 1024, 8192, 1, 8, False),
    ],
)  # fmt: skip
def test_few_rows_have_several_programs_each(variant, size, room, columns, pieces, warps, clustered):
    division = normalisation.divide(variant, size, room, columns, 2, SMS, 16)
    assert (division.pieces, division.warps, division.clustered) == (pieces, warps, clustered)


def agreed(ctx):
    """Ranks whose GPUs have clusters of other sizes, in a new group."""
    own, communicator.largest_cluster = communicator.largest_cluster, lambda: 16 >> ctx.cur_rank
    try:
        assert ctx.ccl.communicator(dist.new_group()).largest_cluster == 16 >> (ctx.num_ranks - 1)
    finally:
        communicator.largest_cluster = own


def test_all_ranks_take_the_smallest_cluster_of_any(ranks):
    ranks.run(agreed)
