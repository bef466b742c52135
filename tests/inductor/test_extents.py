"""Extents that are not known, computed from data, or differ between ranks; and groups whose ranks have no context."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from covering import EVERYTHING, thorough
from torch import nn
from torch.nn import functional as F

from inductor.searched import FusionReport, compiled, expect
from iris.compat.c10d import default_store
from iris.distributed import contexts
from iris.distributed.contexts import Place
from iris.inductor import graph_pass

H, K = 16, 12


def random(ctx, shape, seed=0):
    """Each rank's, or those with each rank's shape."""
    shapes = shape if isinstance(shape, list) else [shape] * ctx.num_ranks
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(each, generator=generator).to(ctx.device) for each in shapes]


# From data ------------------------------------------------------------------------------------------------------------


def rows_of(x, number):
    n = number.item()
    torch._check(n >= 2)
    torch._check(n <= x.shape[0])
    return x[:n]


def normalised(x, w, number, group):
    rows = rows_of(x, number)
    total = rows + funcol.all_reduce(torch.tanh(rows), "sum", group)
    return F.rms_norm(total, (H,), w[0], 1e-5), total


def multiplied(x, w, number, group):
    return funcol.all_reduce(rows_of(x, number) @ w, "sum", group)


def gathered(x, w, number, group):
    return funcol.all_gather_tensor_autograd(rows_of(x, number), 0, group) @ w


def scattered(x, w, number, group):
    rows = rows_of(x, number) @ w
    # Of as many rows as are given; the number that is scattered is known to be even so.
    return funcol.reduce_scatter_tensor(torch.cat([rows, rows]) @ w, "sum", 0, group)


# What is fused, and the reasons of the rest.
FROM_DATA = {
    normalised: ({"all_reduce + residual + RMSNorm": 1}, ()),
    multiplied: ({"product + all_reduce": 1}, ()),
    gathered: ({}, ("computed from data",)),
    scattered: ({}, ("computed from data",)),
}


def compare_from_data(ctx, function):
    group, report = dist.new_group(backend="cuda:iris"), FusionReport()
    w = random(ctx, (H, H), 1)[ctx.cur_rank]
    with torch.no_grad(), torch._dynamo.config.patch(capture_scalar_outputs=True):
        run = compiled(lambda *given: function(*given, group), report)
        for turn, number in enumerate((3, 5)):
            given = random(ctx, (6, H), 2 + turn)[ctx.cur_rank], w, torch.tensor(number, device=ctx.device)
            torch.testing.assert_close(run(*given), function(*given, group), rtol=1e-4, atol=1e-5)
    fused, kept = FROM_DATA[function]
    expect(report, fused, *kept)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "function",
    [normalised, gathered, *map(thorough, (multiplied, scattered))],
)
def test_extents_that_are_computed_from_data(ranks, function):
    ranks.run(compare_from_data, function)


# Left to a reshape ----------------------------------------------------------------------------------------------------


def compare_inferred(ctx):
    """A reshape leaves an extent to torch, besides the one that is scattered, so two are not known."""
    group, report = dist.new_group(backend="cuda:iris"), FusionReport()
    x, w = random(ctx, (4, 6, H))[ctx.cur_rank], random(ctx, (H, K), 1)[ctx.cur_rank]

    def function(x, w):
        return funcol.reduce_scatter_tensor((x.flatten(0, 1) @ w).view(x.shape[0], -1, w.shape[1]), "sum", 0, group)

    with torch.no_grad():
        result = compiled(function, report, dynamic=True)(x, w)
        torch.testing.assert_close(result, function(x, w), rtol=1e-4, atol=1e-5)
    expect(report, {}, "extents of several dimensions")


@pytest.mark.thorough
@pytest.mark.ranks(2)
def test_an_extent_that_a_reshape_leaves_to_torch(ranks):
    ranks.run(compare_inferred)


# Another one on each rank ---------------------------------------------------------------------------------------------


def compare_uneven(ctx, shape, dim):
    """Of weights that are split unevenly, in the rows or columns that no collective moves, and then evenly again."""
    group, me, W = dist.new_group(backend="cuda:iris"), ctx.cur_rank, ctx.num_ranks
    x = random(ctx, shape)

    def mlp(x, up, down):
        hidden = torch.tanh(funcol.all_gather_tensor_autograd(x, dim, group) @ up)
        part = funcol.reduce_scatter_tensor(hidden @ down, "sum", dim, group)
        return part + 1, funcol.all_reduce(hidden @ down, "sum", group)

    # The last rank has none.
    for turn, inside in enumerate([[5, 3, 0][-W:], [5] * W]):
        report = FusionReport()
        up = random(ctx, [(K, each) for each in inside], 1 + turn)
        down = random(ctx, [(each, H) for each in inside], 5 + turn)
        with torch.no_grad():
            # The two products are one for the compiler.
            part, total = compiled(mlp, report)(x[me], up[me], down[me])
        whole = torch.cat(x, dim).double()
        exact = sum(torch.tanh(whole @ a.double()) @ b.double() for a, b in zip(up, down, strict=True))
        torch.testing.assert_close(part.double(), exact.chunk(W, dim)[me] + 1, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(total.double(), exact, rtol=1e-5, atol=1e-5)
        assert report.fused("all_gather + product") == 1, str(report)


@pytest.mark.ranks(*((2, 3) if EVERYTHING else (2,)))
@pytest.mark.parametrize(("shape", "dim"), [((4, K), 0), ((3, 2, K), 1)])
def test_weights_that_are_split_unevenly(ranks, shape, dim):
    ranks.run(compare_uneven, shape, dim)


def compare_plan(ctx):
    """As DTensor splits seven among the ranks."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(5)
    mlp, report = nn.Sequential(nn.Linear(H, 7, bias=False), nn.Tanh(), nn.Linear(7, H, bias=False)), FusionReport()
    mlp, x = mlp.to(ctx.device), random(ctx, (3, H))[0]
    group = dist.new_group(backend="cuda:iris")
    with torch.no_grad():
        exact = mlp(x)
        plan = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}
        parallel = parallelize_module(mlp, DeviceMesh.from_group(group, ctx.device.type), plan)
        torch.testing.assert_close(compiled(parallel, report)(x), exact, rtol=1e-4, atol=1e-5)
    expect(report, {"product + all_reduce": 1})


@pytest.mark.thorough
@pytest.mark.ranks(2)
def test_a_plan_that_splits_unevenly(ranks):
    ranks.run(compare_plan)


# Where no context can be ----------------------------------------------------------------------------------------------

NEAR, FAR = Place("near", "GPU-0", []), Place("far", "GPU-9", [])
OUT_OF_REACH = "there are GPUs in the group that cannot access each other's memory"
PLACES = [
    ([NEAR, Place("near", "GPU-1", [])], None),
    ([NEAR, Place("near", "GPU-1", ["GPU-0", "GPU-9"])], OUT_OF_REACH),
    # Of the group, or on another host.
    ([NEAR, Place("near", "GPU-1", ["GPU-9"]), FAR, Place("far", "GPU-8", ["GPU-0"])], None),
    ([NEAR, Place("near", "GPU-1", []), FAR], "its hosts have different numbers of the group's ranks"),
    ([Place("near", None, [])] * 2000, "a host has more than"),
]


@pytest.mark.parametrize(("places", "reason"), PLACES, ids=range(len(PLACES)))
def test_whose_ranks_can_have_a_context(monkeypatch, places, reason):
    monkeypatch.setattr(contexts, "_places", {"store": dict(enumerate(places))})
    monkeypatch.setattr(contexts, "default_store", lambda: "store")
    monkeypatch.setattr(contexts.dist, "get_process_group_ranks", lambda group: range(len(places)))
    monkeypatch.setattr(contexts.dist, "get_backend", lambda group: "nccl")
    why = contexts._why("group")
    assert (why is None) == (reason is None) and (reason or "") in (why or "")


def saying(ctx):
    """Each rank says where it runs, and knows no reason before all have."""
    with mock.patch.object(contexts, "_places", {}), mock.patch.object(contexts, "PATIENCE_S", 0.01):
        store = dist.PrefixStore("a test", default_store())
        with mock.patch.object(contexts, "_store", lambda: store), mock.patch.object(contexts, "_waited", set()):
            if ctx.cur_rank == 0:
                assert contexts.known_reasons() is None and graph_pass.identity() is None
            ctx.barrier()
            contexts.say_place()
            assert contexts.why_no_context(dist.group.WORLD.group_name) is None
            ctx.barrier()
            assert contexts.known_reasons() == {} and graph_pass.identity() is not None
            assert set(contexts._places[default_store()]) == set(range(dist.get_world_size()))


@pytest.mark.ranks(2)
def test_what_is_cached_depends_on_where_ranks_run(ranks):
    ranks.run(saying)
    with mock.patch.object(graph_pass, "known_reasons", lambda: {"0": "a reason"}):
        other = graph_pass.identity()
    assert other != graph_pass.identity() and other.startswith(graph_pass.VERSION)


def test_a_group_of_torchs_that_has_no_other_ranks(monkeypatch):
    monkeypatch.setattr(contexts.dist, "get_backend", lambda group: "fake")
    assert "no other ranks" in contexts._why("group")


def stays(ctx, fused):
    group, report = dist.new_group(backend="cuda:iris"), FusionReport()
    x, w = random(ctx, (4, H))[ctx.cur_rank], random(ctx, (H, H), 1)[ctx.cur_rank]

    def function(x, w):
        total = x + funcol.all_reduce(torch.tanh(x), "sum", group)
        y = funcol.all_reduce(F.rms_norm(total, (H,), w[0], 1e-5) @ w, "sum", group)
        whole = funcol.all_gather_tensor_autograd(y, 0, group) @ w
        return funcol.reduce_scatter_tensor(torch.tanh(whole) @ w, "sum", 0, group)

    places, _ = PLACES[0 if fused else 1]
    known = {default_store(): dict(enumerate(places))}
    with torch.no_grad(), mock.patch.object(contexts, "_places", known):
        result = compiled(function, report)(x, w)
        reasons = contexts.known_reasons()
    torch.testing.assert_close(result, function(x, w), rtol=1e-4, atol=1e-4)
    if fused:
        assert reasons == {} and len(report) == 4 and all(each.kept is None for each in report), str(report)
    else:
        assert reasons[group.group_name] == OUT_OF_REACH
        # The sum that has no norm is looked at as that of a product, which it is not.
        expect(report, {}, OUT_OF_REACH, "and not of a product", *[OUT_OF_REACH] * 3)


@pytest.mark.ranks(2, exactly=True)
@pytest.mark.parametrize("fused", [True, False])
def test_a_group_without_a_context_keeps_its_collectives(ranks, fused):
    ranks.run(stays, fused)
