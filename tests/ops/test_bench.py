"""The benchmark of fused operations: who is measured, and that a wrong result is noticed."""

import json
import re
from pathlib import Path

import click
import pytest
import torch
import torch.distributed as dist

from iris.bench import norms, operations, ops_command, plots
from iris.bench.report import save_rows
from iris.errors import InvalidValueError


def measured(ctx):
    libraries = ["iris", "iris triton", "iris copies", "gemm", *norms.OF_IRIS[1:], "vendor", "all_reduce"]
    shapes = [(32, 16, 32), (48, 16, 32), (4 * ctx.num_ranks, 40, 0), (2 * ctx.num_ranks + 1, 24, 0)]
    return list(operations.measure(ctx, list(operations.OPERATIONS), shapes, libraries, torch.float32))


def test_what_is_measured(ranks, tmp_path):
    rows, *others = ranks.run(measured)
    assert all([row[:6] for row in other] == [row[:6] for row in rows] for other in others)
    refused = [row for row in rows if row.reason]
    assert [row.library for row in refused] == (["iris sharded", "iris sharded fp8"] if ranks.num_ranks > 1 else [])
    assert all("ranks cannot own equal parts of" in row.reason and not row.failed for row in refused)
    timed = [row for row in rows if row not in refused]
    assert all(row.microseconds > 0 for row in timed)
    by_copies = {row.operation for row in rows if row.library == "iris copies"}
    assert by_copies == {"all_gather_matmul", "matmul_reduce_scatter"}
    of_norms = [row.library for row in rows if row.operation == operations.NORM]
    assert of_norms == 2 * [*norms.OF_IRIS, "vendor", "all_reduce"]
    for row in timed:
        if row.operation == operations.NORM and row.library != "all_reduce":
            assert 0 < row.error < (0.05 if "fp8" in row.library else 1e-6)
        else:
            assert row.error is None
    assert len(rows) == 2 * (4 * 5 + len(by_copies)) + len(of_norms)
    save_rows(tmp_path / "operations_2.csv", 2, 1, rows)
    written = json.loads((tmp_path / "operations_2.json").read_text())
    assert [operations.Row(**row) for row in written["rows"]] == rows
    assert {file.stem for file in plots.draw_operations(tmp_path, "operations_2", rows)} == {
        f"{operation}_operations_2" for operation in operations.OPERATIONS
    }


def of_fp8(ctx):
    libraries = ["iris", "iris gluon", "iris triton", "iris copies", "vendor", "gemm"]
    # The vendor's GEMM takes multiples of 16, and each rank has its part of the rows, of the columns or of the depth.
    shape = (16 * ctx.num_ranks, 16 * ctx.num_ranks, 32 * ctx.num_ranks)
    return list(operations.measure(ctx, list(operations.PRODUCTS), [shape], libraries, torch.float8_e4m3fn))


@pytest.mark.thorough
def test_products_of_fp8(ranks):
    rows, *_ = ranks.run(of_fp8)
    assert not [row for row in rows if row.reason] and all(row.microseconds > 0 for row in rows)
    assert len(rows) == 4 * 5 + 2 + 4
    with pytest.raises(click.UsageError, match="all_reduce_rms_norm adds up rows of fp16"):
        ops_command.run(("all_reduce_rms_norm",), (), "float8_e4m3fn", (), False, None, None)


def test_a_sweep_comes_besides_the_other_shapes(monkeypatch):
    given = []
    monkeypatch.setattr(ops_command.ranks, "number", lambda asked: asked)
    monkeypatch.setattr(ops_command.ranks, "run", lambda num_ranks, work, *args: given.append(args[3]))
    for shapes, sweep in (((), False), ((), True), (((8, 8, 8),), False), (((8, 8, 8),), True)):
        ops_command.run((), (), "bfloat16", shapes, sweep, None, None, 2)
    usual, both, one, one_and_sweep = given
    # JAX's example has 1024 rows of A and 4096 columns of B on each rank.
    assert usual == [*operations.SHAPES, (2048, 8192, 4096), *norms.SHAPES]
    assert (4096, 16384, 4096) in operations.default_shapes(4)
    assert set(both) == {*usual, *operations.SWEEP} and len(both) == len(set(both))
    assert one == [(8, 8, 8)] and one_and_sweep == [(8, 8, 8), *operations.SWEEP]


ROOT = Path(__file__).parents[2]


def test_make_perf_measures_all_that_has_a_floor():
    shapes = [shape.split("x") for shape in re.findall(r"--shape (\S+)", (ROOT / "Makefile").read_text())]
    rows = [
        operations.Row(name, *map(int, shape), "bfloat16", library, 1.0)
        for name in operations.OPERATIONS
        for shape in shapes
        for library in ("iris", "vendor")
        if (name == operations.NORM) == (shape[2] == "0")
    ]
    measured = ops_command.figures(rows)
    floors = json.loads((ROOT / "benchmarks" / "floors.json").read_text())["NVIDIA H200"]["ops"]
    assert len(measured) == len(rows) / 2
    assert all(set(bounds) <= set(measured) for bounds in floors.values())


def of_fp32(ctx):
    return list(operations.measure(ctx, ["matmul_all_gather"], [(32, 16, 32)], ["iris", "iris gluon"], torch.float32))


def test_what_a_library_cannot_do_is_no_failure(ranks, capsys):
    rows, *_ = ranks.run(of_fp32)
    ours, gluons = rows
    assert ours.microseconds > 0 and gluons.microseconds is None
    assert not ours.failed and not gluons.failed and ours._replace(reason="wrong result").failed
    ops_command.show(rows)
    printed = capsys.readouterr().out
    assert re.search(r"32, 16, 32 +│ +[\d.]+ +│ - +│", printed)
    assert "iris gluon: not available: FusedConfig(use_gluon=True) cannot do this" in " ".join(printed.split())


@pytest.mark.parametrize(
    ("names", "libraries", "shapes", "words"),
    [
        ((), (), [(31, 16, 32)], "--shape 31x16x32 .*2 ranks cannot share M=31 in all_gather_matmul.* multiple of 2"),
        (("matmul_all_reduce",), (), [(32, 16, 33)], "share K=33 in matmul_all_reduce"),
        ((), (), [(8, 8, 8), (0, 16, 32)], "--shape 0x16x32 cannot be measured: M is 0; give 1 or more"),
        ((), (), [(8, 0, 0)], "N is 0"),
        (("matmul_all_gather",), ("iris copies",), [], "Nothing to measure: iris copies cannot do matmul_all_gather"),
        (("matmul_all_gather",), (), [(8, 4096, 0)], "Nothing to measure: products have shapes MxNxK"),
    ],
)
def test_what_cannot_be_measured_is_refused(names, libraries, shapes, words, monkeypatch):
    monkeypatch.setattr(ops_command.ranks, "number", lambda asked: asked)
    monkeypatch.setattr(ops_command.ranks, "run", lambda *args: pytest.fail("measures"))
    with pytest.raises(click.UsageError, match=words):
        ops_command.run(names, libraries, "bfloat16", tuple(shapes), False, None, None, 2)


def ask_for_rails(ctx):
    with pytest.raises(InvalidValueError, match="'iris in turn' is for ranks on several hosts, and these are on one"):
        ops_command.run_on_rank(["all_gather_matmul"], ("iris in turn",), "float32", [(2, 2, 2)], {}, None, None)


@pytest.mark.ranks(1)
def test_what_has_no_meaning_on_one_host_is_refused(ranks):
    ranks.run(ask_for_rails)


def test_usual_shapes_are_left_out_where_ranks_cannot_share_them(monkeypatch):
    """Three ranks share the last product, and the rows to normalise, which each of them has in whole."""
    given = []
    monkeypatch.setattr(ops_command.ranks, "number", lambda asked: asked)
    monkeypatch.setattr(ops_command.ranks, "run", lambda *args: given.append(args))
    ops_command.run((), (), "bfloat16", (), False, None, None, 3)
    assert given and operations.problem("all_gather_matmul", operations.SHAPES[0], 3)
    assert not operations.problem("all_gather_matmul", (3072, 12288, 4096), 3)


def spoilt(ctx):
    x = operations.operands(ctx, "matmul_all_reduce", (32, 16, 32), torch.float32)
    call = operations.case(ctx, "matmul_all_reduce", "iris", x)
    assert operations.check(ctx, "matmul_all_reduce", x, call) == ("", None)
    wrong = operations.check(ctx, "matmul_all_reduce", x, lambda: (call(), x.out[3].zero_()))
    assert "wrong result" in wrong.reason


def test_a_wrong_result_is_noticed(ranks):
    ranks.run(spoilt)


def left_undone(ctx):
    """What a library leaves undone is not found where another one has left it."""
    x, done = norms.rows(ctx, (2 * ctx.num_ranks, 16, 0), torch.float32), {}
    for library in norms.OF_IRIS:
        call = norms.of_iris(ctx, x, library)
        assert norms.check(ctx, x, library, call).reason == ""
        done[library] = {
            "nothing": lambda: None,
            "no residual": lambda call=call: (before := x.residual.clone(), call(), x.residual.copy_(before)),
        }
    return [
        (library, what, norms.check(ctx, x, library, call).reason.partition(":")[0])
        for library, calls in done.items()
        for what, call in calls.items()
    ]


def test_what_a_norm_leaves_undone_is_noticed(ranks):
    # Without a residual, what becomes of it does not matter.
    wanted = [
        (library, what, "wrong result" if what == "nothing" else "" if library == "iris" else "wrong residual")
        for library in norms.OF_IRIS
        for what in ("nothing", "no residual")
    ]
    assert all(found == wanted for found in ranks.run(left_undone))


def without_the_residual(ctx):
    """Rank 0's rows are added twice in its place."""
    x = norms.rows(ctx, (4, 16, 0), torch.float32)

    def call():
        total, first = x.input.clone(), x.input.clone()
        dist.all_reduce(total)
        dist.broadcast(first, 0)
        x.out.copy_(torch.nn.functional.rms_norm(total + first, x.weight.shape, x.weight, norms.EPS))

    return norms.check(ctx, x, norms.RESIDUAL, call).reason


def test_a_residual_that_is_left_out_is_noticed(ranks):
    assert all("wrong result" in reason for reason in ranks.run(without_the_residual))
