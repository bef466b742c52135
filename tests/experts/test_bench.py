"""The benchmark of dispatch and combine: who is measured, and that a wrong result is noticed."""

import json
import re
import runpy
from importlib.util import find_spec
from pathlib import Path

import click
import pytest
import torch
from covering import EVERYTHING

from iris.bench import experts, experts_command, plots, report
from iris.errors import UnknownChoiceError
from iris.experts import ExpertParallel

ROOT = Path(__file__).parents[2]
SHAPES = [experts.Shape(1, 256, 12, 5), experts.Shape(6, 256, 12, 1)]


def measured(ctx, wrong):
    if wrong:
        right = ExpertParallel.combine

        def combine(self, *args, **named):
            return right(self, *args, **named).add_(ctx.cur_rank)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ExpertParallel, "combine", combine)
            return list(experts.measure(ctx, SHAPES, ["compact"], [0], ["iris", "torch"], torch.float32))
    return list(experts.measure(ctx, SHAPES, experts.LAYOUTS, [0, 2], experts.LIBRARIES, torch.bfloat16))


@pytest.mark.thorough
@pytest.mark.ranks(*((2, 3) if EVERYTHING else (2,)))
def test_what_is_measured(ranks):
    rows, *others = ranks.run(measured, False)
    assert all([row[:8] for row in other] == [row[:8] for row in rows] for other in others)
    assert [row[5:8] for row in rows] == 2 * [
        ("", 0, "torch"),
        *((each, count, library) for library in ("iris", experts.FP8) for each in experts.LAYOUTS for count in (0, 2)),
    ]
    assert not [row for row in rows if row.reason] and all(row.call_microseconds > 0 for row in rows)


@pytest.mark.ranks(2)
def test_a_wrong_result_is_noticed_on_all_ranks(ranks):
    for rows in ranks.run(measured, True):
        for row in rows:
            assert row.reason == ("" if row.library == "torch" else "rank 1: wrong result: differs by 1")
            assert (row.call_microseconds is None) == (row.library == "iris")


def elsewhere(ctx):
    """Each token comes to the experts after its own, and back from there as it was."""
    dispatch, by_torch, shape = ExpertParallel.dispatch, experts.ByTorch.__call__, experts.Shape(6, 64, 6, 2)

    def after(ids):
        return (ids + 1) % shape.num_experts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ExpertParallel, "dispatch", lambda ep, x, ids, *rest, **o: dispatch(ep, x, after(ids), *rest, **o)
        )
        patch.setattr(experts.ByTorch, "__call__", lambda way, x: by_torch(way, x._replace(ids=after(x.ids))))
        rows = list(experts.measure(ctx, [shape], experts.LAYOUTS, [0], ["iris", "torch"], torch.float32))
    return [(row.library, row.layout, "wrong result: differs by" in row.reason) for row in rows]


@pytest.mark.ranks(2)
def test_rows_that_come_to_other_experts_are_noticed(ranks):
    wanted = [("torch", "", True), *(("iris", layout, True) for layout in experts.LAYOUTS)]
    assert all(found == wanted for found in ranks.run(elsewhere))


def test_the_busiest_rank_sends_a_row_for_each_other_rank_of_a_token(monkeypatch):
    ids = {0: [[0, 1], [2, 3], [0, 5]], 1: [[2, 2], [2, 3], [2, 3]], 2: [[0, 2], [4, 5], [4, 5]]}
    # Two experts a rank. Rank 0 sends 2 rows and 1 of rank 2 back, rank 1 those of rank 0 and 2, rank 2 2 and 1.
    monkeypatch.setattr(experts, "route", lambda shape, rank, *_: experts.Routed(None, torch.tensor(ids[rank]), None))
    shape, cpu = experts.Shape(3, 256, 6, 2), torch.device("cpu")
    assert experts.link_bytes(shape, 3, torch.bfloat16, cpu, "iris") == 3 * 512
    # Rank 0 sends 2 rows and 1 back, as rank 2 does. A row there is half as long, and has two factors.
    assert experts.link_bytes(shape, 3, torch.bfloat16, cpu, experts.FP8) == 2 * (256 + 8) + 512
    # The last factor may be of fewer than 128 elements.
    assert experts.row_bytes(shape._replace(hidden=272), torch.bfloat16, experts.FP8) == (272 + 12, 544)


def test_what_cannot_be_measured_is_told():
    def run(num_experts=8, top_k=2, layouts=(), libraries=()):
        experts_command.run((1,), 16, num_experts, top_k, layouts, libraries, "float32", (0,), None, None, 2)

    with pytest.raises(UnknownChoiceError, match="--layout"):
        run(layouts=("dense",))
    with pytest.raises(UnknownChoiceError, match="--library"):
        run(libraries=("nccl",))
    with pytest.raises(click.UsageError, match="--experts 7 cannot be shared by 2 ranks; give a multiple of 2"):
        run(num_experts=7)
    with pytest.raises(click.UsageError, match="--top-k 9 is more than there are experts, 8"):
        run(top_k=9)


def write(ctx, folder):
    """What rank 0 has written; under torchrun each rank has a folder of its own."""
    (missed,) = experts_command.run_on_rank(SHAPES, (), (), "float32", (0,), folder / "floors.json", folder)
    # In the simulator, which has no graphs, it was not measured.
    assert missed.startswith("pair_6x256_us ") and "bound" in missed
    if ctx.cur_rank > 0:
        return None
    assert (folder / "experts_float32_2.svg").exists() == bool(find_spec("matplotlib"))
    return json.loads((folder / "experts_float32_2.json").read_text())


@pytest.mark.ranks(2, exactly=True)
def test_rows_are_written_with_what_they_depend_on(ranks, tmp_path):
    floors = {report.environment()["device"]: {"experts": {"2": {"pair_6x256_us": 0}}}}
    (tmp_path / "floors.json").write_text(json.dumps(floors))
    written, _ = ranks.run(write, tmp_path)
    assert written["num_ranks"] == 2 and [row["layout"] for row in written["rows"]] == 2 * ["", *2 * experts.LAYOUTS]


def test_make_perf_measures_all_that_has_a_floor():
    (tokens,) = re.findall(r"bench experts .*--tokens (\S+)", (ROOT / "Makefile").read_text())
    rows = [
        experts.Row(int(each), 7168, 256, 8, "bfloat16", layout, sms, library, 1.0, 1.0, 1.0)
        for each in tokens.split(",")
        for library, layout, sms in ((experts.FP8, "compact", 0), (experts.FP8, "compact", 16), ("iris", "compact", 0))
    ]
    measured = experts_command.figures(rows)
    floors = json.loads((ROOT / "benchmarks" / "floors.json").read_text())["NVIDIA H200"]["experts"]
    assert 3 * len(measured) == len(rows) and all(set(bounds) == set(measured) for bounds in floors.values())


def test_pictures_are_of_several_numbers_of_tokens(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [
        experts.Row(tokens, 256, 8, 2, "bfloat16", layout, 0, library, graph, 40.0, None)
        for tokens in (1, 8)
        for library, layout, graph in (("torch", "", None), ("iris", "compact", 20.0))
    ]
    assert plots.draw_experts(tmp_path, "experts_2", rows[:2]) == []
    (file,) = plots.draw_experts(tmp_path, "experts_2", rows)
    assert "iris compact" in file.read_text() and file.name == "experts_2.svg"


def test_the_benchmark_of_the_kernel_alone(tmp_path):
    """It compares places: of more tokens of a program than it numbers at a time, and more programs than it adds up."""
    main = runpy.run_path(str(ROOT / "benchmarks" / "experts_dispatch.py"))["main"]
    file = tmp_path / "figures.json"
    main.callback(1, [140], 16, 1024, 3, 4, ["routing"], file)
    (row,) = json.loads(file.read_text())["rows"]
    assert row["tokens"] == 140 and all(time > 0 for time in row["us"].values())
