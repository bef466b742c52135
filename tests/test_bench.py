"""The benchmark of collectives and the tuning of their tables: what they measure, check, choose and write."""

import contextlib
import csv
import functools
import io
import itertools
import json
import os
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
from covering import EVERYTHING

from iris import simulator
from iris.bench import collectives, memory, plots, report, tune
from iris.bench.timing import Operands, capture, counts, do_bench
from iris.ccl import Config
from iris.ccl.algorithms import ALGORITHMS, candidates
from iris.ccl.select import ELSEWHERE, Choice, choose, name_in_table
from iris.errors import InvalidCountError, InvalidTableError
from iris.machine import tables

KIB = 1 << 10
# MiB of a GPU that a group of several ranks may take when it is first used.
MOST_OF_A_GROUP = 32


@pytest.mark.parametrize(
    ("collective", "share"),
    [("all_reduce", 1.5), ("all_gather", 0.75), ("reduce_scatter", 0.75), ("all_to_all", 0.75), ("broadcast", 1.0)],
)
def test_bus_bandwidth_counts_what_each_link_must_carry(collective, share):
    assert collectives.bus_bytes(collective, 1000, 4) == 1000 * share


@pytest.mark.parametrize(
    "nbytes, size, part", [(8, 2, 4), (16, 3, 4), (1024, 4, 256), (1024, 7, 144), (1 << 20, 6, 174752)]
)
def test_any_number_of_ranks_shares_a_size_by_the_widest_accesses(nbytes, size, part):
    for itemsize in (2, 4):
        assert counts(nbytes, itemsize, size) == (size * part // itemsize, size * part // itemsize, part // itemsize)


def test_a_graph_keeps_the_memory_of_its_calls(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "graph", contextlib.nullcontext)
    own = torch.zeros(1)
    freed = weakref.ref(own)
    graph = capture(functools.partial(own.add_, 1), lambda: None, per_graph=3)
    del own
    assert freed().item() == 3
    del graph
    assert freed() is None


LIBRARIES = ["iris", "iris gluon", "nccl"]


def measured(ctx):
    chosen = ["all_reduce", "broadcast"]
    rows = list(collectives.measure(ctx, chosen, [2 * KIB], [0], LIBRARIES, torch.float32))
    assert [(row.collective, row.library) for row in rows] == [(name, each) for name in chosen for each in LIBRARIES]
    for row in rows:
        assert row.bytes == 2 * KIB and row.dtype == "float32" and row.sms == 0 and row.reason == ""
        moved = collectives.bus_bytes(row.collective, row.bytes, ctx.num_ranks)
        assert row.microseconds > 0 and row.bus_GBps == pytest.approx(moved / row.microseconds / 1e3)
        assert (row.error is None) == (row.collective != "all_reduce")
    return [row._replace(microseconds=None, bus_GBps=None) for row in rows]


def test_libraries_are_measured_side_by_side(ranks):
    first, *others = ranks.run(measured)
    assert all(rows == first for rows in others), "ranks have different rows"


def wrong_results(ctx, dtype):
    operands = Operands(*(ctx.empty(n, dtype=dtype) for n in (64, 64, 64 // ctx.num_ranks)))
    for collective in collectives.COLLECTIVES:
        found = collectives.check(ctx, collective, operands, lambda: None, 256)
        assert found.reason == ("" if collective == "broadcast" and ctx.cur_rank == 0 else "wrong result")
        call = collectives.iris_calls(ctx, operands, None)[collective]
        reason, error = collectives.check(ctx, collective, operands, call, 256)
        assert not reason
        got = operands.part if collective == "reduce_scatter" else operands.out

        def spoilt(call=call, got=got):
            call()
            got[-1] += got[-1] * 2**-7 if dtype.is_floating_point else 1

        # Of what is moved, and of whole numbers, the last bit counts.
        rounds = collective in collectives.SUMS and dtype.is_floating_point
        reason = collectives.check(ctx, collective, operands, spoilt, 256).reason
        assert reason == ("" if rounds else "wrong result")
        if rounds:
            # Rounded once; two or three numbers may do without.
            assert error <= torch.finfo(dtype).eps and (error > 0 or dtype != torch.bfloat16)
        else:
            assert error is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32], ids=str)
def test_a_wrong_result_is_told(ranks, dtype):
    ranks.run(wrong_results, dtype)


ROWS = [
    collectives.Row("all_reduce", "bfloat16", nbytes, sms, library, 2.0 + sms, 10.0 / (1 + sms))
    for nbytes in (KIB, 8 * KIB)
    for sms in (0, 4, 8)
    for library in ("iris", "nccl")
]


def clear_settings(monkeypatch):
    of_the_vendor = [name for name in os.environ if name.startswith(report.OF_THE_VENDOR)]
    for name in (*report.SETTINGS, *of_the_vendor, "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "variables, typed",
    [
        ({}, "python"),
        ({"WORLD_SIZE": "4"}, "torchrun --nproc-per-node 4"),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "1"}, "torchrun --nproc-per-node 4"),
        ({"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "3", "GROUP_WORLD_SIZE": "2"},
         "torchrun --nnodes 2 --nproc-per-node 3"),
        ({"IRIS_HOST": "a", "IRIS_OVER_HOSTS": "iris", "IRIS_NETWORK_GBPS": "25", "NCCL_NET": "IB"},
         "IRIS_HOST=a IRIS_OVER_HOSTS=iris IRIS_NETWORK_GBPS=25 NCCL_NET=IB python"),
    ],
)  # fmt: skip
def test_a_command_is_recorded_with_what_it_depends_on(variables, typed, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["program.py", "--rounds", "3"])
    clear_settings(monkeypatch)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert report.command() == f"{typed} program.py --rounds 3"


def test_what_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/iris/__main__.py", "bench", "ccl", "--library", "iris gluon"])
    clear_settings(monkeypatch)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("IRIS_WAIT_TIMEOUT_S", "2.5")
    collectives.write(tmp_path, 4, ROWS, {"copy_engine_GBps": 1.0})
    written = json.loads((tmp_path / "collectives_4.json").read_text())
    typed = "IRIS_WAIT_TIMEOUT_S=2.5 torchrun --nproc-per-node 4 -m iris bench ccl --library 'iris gluon'"
    assert written["command"] == typed
    assert written["num_ranks"] == 4 and written["copy_engine_GBps"] == 1.0
    assert [collectives.Row(**row) for row in written["rows"]] == ROWS
    with open(tmp_path / "collectives_4.csv", newline="") as file:
        header, *lines = csv.reader(file)
    assert header == list(collectives.Row._fields) and len(lines) == len(ROWS)
    assert {file.name for file in plots.draw(tmp_path, 4, ROWS)} == {
        "all_reduce_4_by_size.svg", "all_reduce_4_by_sms.svg"
    }  # fmt: skip


def test_what_is_written_of_another_dtype_lies_beside_that_of_bf16(tmp_path):
    of_fp32 = [row._replace(dtype="float32", microseconds=1.0) for row in ROWS]
    pictures = {}
    for rows in (ROWS, of_fp32):
        collectives.write(tmp_path, 2, rows, {})
        pictures[rows[0].dtype] = {file.stem for file in plots.draw(tmp_path, 2, rows)}
    for name, rows in (("collectives_2", ROWS), ("collectives_float32_2", of_fp32)):
        written = json.loads((tmp_path / f"{name}.json").read_text())
        assert [collectives.Row(**row) for row in written["rows"]] == rows and (tmp_path / f"{name}.csv").exists()
    assert pictures == {
        "bfloat16": {"all_reduce_2_by_size", "all_reduce_2_by_sms"},
        "float32": {"all_reduce_float32_2_by_size", "all_reduce_float32_2_by_sms"},
    }
    assert report.file_name("sweep", "float8_e4m3fn", "2x8") == "sweep_float8_e4m3fn_2x8"


def test_growth_is_drawn_of_what_every_number_of_ranks_has(tmp_path):
    for num_ranks, sizes in ((2, [8, 16]), (4, [8, 32]), (8, [8, 64])):
        rows = [collectives.Row("all_gather", "bfloat16", n * KIB, 0, "iris", 1.0 * n, 1.0) for n in sizes]
        collectives.write(tmp_path, num_ranks, [*rows, ROWS[0]._replace(bytes=num_ranks)], {})
        # Of another type there is less, and it is drawn by itself.
        if num_ranks > 2:
            collectives.write(tmp_path, num_ranks, [row._replace(dtype="float32") for row in rows], {})
        (file, *_) = plots.draw_by_ranks(tmp_path, "bfloat16") or [None]
        assert (file is None) == (num_ranks == 2)
    # The one size in all, and the one a rank; and nothing of what has none.
    for dtype, names in (
        ("bfloat16", ["all_gather_by_ranks.svg", "all_reduce_by_ranks.svg"]),
        ("float32", ["all_gather_float32_by_ranks.svg"]),
    ):
        assert [each.name for each in plots.draw_by_ranks(tmp_path, dtype)] == names
    text = file.read_text()
    assert all(f"<!-- {label} -->" in text for label in ("8 KiB", "2", "4", "8"))


def test_floors(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    floors = tmp_path / "floors.json"
    bounds = {"a_us": 3.0, "b_us": 3.0, "c_GBps": 5.0, "d_GBps": 5.0, "e_us": 1.0}
    floors.write_text(json.dumps({report.environment()["device"]: {"ccl": {"2": bounds, "2x2": {"a_us": 1.0}}}}))
    figures = {"a_us": 2.9, "b_us": 3.1, "c_GBps": 5.1, "d_GBps": 4.9}
    missed = report.below_floor(floors, "ccl", 2, figures)
    assert [line.split()[0] for line in missed] == ["b_us", "d_GBps", "e_us"]
    # Those of as many ranks on each of as many hosts count, and no others.
    assert len(report.below_floor(floors, "ccl", 4, figures, num_hosts=2)) == 1 and not capsys.readouterr().err
    for num_ranks, num_hosts, ranks in ((4, 1, "4"), (4, 4, "4x1"), (2, 2, "2x1")):
        assert report.below_floor(floors, "ccl", num_ranks, figures, num_hosts) == []
        assert f"has no floors of ccl for {ranks} ranks on" in capsys.readouterr().err


def tuned(ctx):
    lines = []
    comm = ctx.ccl.communicator()
    small, large = (set(candidates(comm, "all_reduce", nbytes)) for nbytes in (KIB, comm.workspace.limit))
    assert small - large == {"one_shot", "two_shot_push", "two_shot_direct"}
    before = comm.table
    sizes = [16 * KIB, 32 * KIB] if EVERYTHING else [32 * KIB]
    table = tune.tune(ctx, sizes, lines.append)
    assert ctx.ccl.communicator().table == before
    # Where a pick changes a size between these is measured, too.
    assert len(sizes) * len(table) <= len(lines) < 2 * len(sizes) * len(table)
    return table


# Three ranks share no size in KiB.
@pytest.mark.thorough
@pytest.mark.ranks(3)
def test_a_table_is_measured_and_carries_every_call(ranks):
    first, *others = ranks.run(tuned)
    assert all(table == first for table in others), "ranks have different tables"
    assert set(first) == {name_in_table(name, few) for name in ELSEWHERE for few in (False, True)}
    for collective in ELSEWHERE:
        chosen = (each for each in ALGORITHMS if collective in each.collectives and not each.on_request)
        variants = {each.name for each in chosen} - tune.SMALL
        for nbytes, sms in itertools.product((1, 16 * KIB, 1 << 40), (None, 8)):
            assert choose(first, collective, nbytes, Config(comm_sms=sms), variants).variant in variants
        # What cannot carry any size has a limit, whatever size was the largest that was measured.
        rows = [row for few in (False, True) for row in first[name_in_table(collective, few)]]
        assert all(row.limit is not None for row in rows if row.variant in tune.SMALL)


def test_a_pick_changes_where_it_pays():
    a, b = ("one_hop", None), ("exchange", 32)
    # b is faster at 2 by chance; from 8 on it is a little faster each time, which together is more than a change costs.
    measured = [(1, {a: 2.0}), (2, {a: 3.0, b: 2.95}), (4, {a: 4.0, b: 4.1}), (8, {a: 8.0, b: 7.9}),
                (16, {a: 16.0, b: 15.7}), (32, {b: 31.0})]  # fmt: skip
    assert tune.cheapest(measured) == [(1, *a), (2, *a), (4, *a), (8, *b), (16, *b), (32, *b)]


def test_where_the_variant_changes_a_size_between_is_measured():
    a, b, more = ("one_shot", None), ("pull", 32), ("pull", 64)
    found = {
        "all_reduce": {4: {a: 1.0, b: 2.0}, 8: {a: 2.0, b: 2.1}, 16: {a: 5.0, b: 3.0}, 32: {b: 6.0, more: 5.0}},
        "broadcast": {8: {a: 1.0, b: 2.0}, 9: {a: 5.0, b: 3.0}, 16: {a: 1.0, b: 2.0}, 32: {a: 9.0, b: 8.0}},
    }
    # Nothing lies between 8 and 9, and other programs are no other variant.
    assert tune.between(found) == {12: ["all_reduce"], 13: ["broadcast"], 24: ["broadcast"]}


def test_rows_of_a_table():
    before = [Choice(KIB, "one_shot", None), Choice(None, "two_shot", None)]
    found = [(1, "one_shot", None), (2, "one_shot", None), (4, "pull", 32), (8, "pull", 32), (16, "pull", 64)]
    assert tune.rows(found, before) == [
        Choice(2, "one_shot", None), Choice(8, "pull", 32), Choice(None, "pull", 64), Choice(None, "two_shot", None),
    ]  # fmt: skip
    assert tune.rows(found[:2], before) == [Choice(2, "one_shot", None), Choice(None, "two_shot", None)]


def test_few_multiprocessors_have_rows_of_their_own():
    table = {"broadcast": [Choice(None, "exchange", 128)]}
    few = {name_in_table("broadcast", True): [Choice(None, "pull", 16)]}
    possible = {"exchange", "pull"}
    for sms, rows, variant, programs in (
        (None, few, "exchange", 128), (33, few, "exchange", 33), (32, few, "pull", 16), (8, few, "pull", 8),
        (32, {}, "exchange", 32),
    ):  # fmt: skip
        chosen = choose(table | rows, "broadcast", 1 << 20, Config(comm_sms=sms), possible)
        assert (chosen.variant, chosen.programs) == (variant, programs)


def test_a_table_without_an_end_says_so():
    with pytest.raises(InvalidTableError, match="no row of broadcast for 2048 bytes.*exchange"):
        choose({"broadcast": [Choice(KIB, "exchange", None)]}, "broadcast", 2 * KIB, Config(), {"exchange"})


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"a GPU": 3}', b"\xff"])
@pytest.mark.parametrize("name", [tables.COLLECTIVES, tables.OPERATIONS])
def test_a_file_that_is_no_table_is_told_before_anything_is_measured(name, content, tmp_path, monkeypatch):
    monkeypatch.setattr(tune, "iris", lambda size: pytest.fail("measures"))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidTableError, match=f"{tmp_path / name} is no table that Iris can add to: .* Remove it"):
        tune.run([KIB], tmp_path)


def test_tables_are_added_to_a_file(tmp_path):
    file = tmp_path / "iris" / "collectives.json"
    for size in (2, 4):
        tune.write(file, {"broadcast": [Choice(None, "exchange", size)]}, "device", str(size))
    assert json.loads(file.read_text()) == {
        "device": {"2": {"broadcast": [[None, "exchange", 2]]}, "4": {"broadcast": [[None, "exchange", 4]]}}
    }


def memory_of_groups(ctx, file):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert memory.run_on_rank(2, file) == []
    return printed.getvalue().splitlines(), file.read_text() if ctx.cur_rank == 0 else ""


def test_memory_of_groups(ranks, tmp_path):
    (printed, written), *others = ranks.run(memory_of_groups, tmp_path / "memory.json")
    assert others == [([], "")] * len(others)
    figures = json.loads(written)["figures"]
    of_all, further, of_one, _, _ = figures.values()
    rounded = [round(each, 2) for each in figures.values()]
    assert [float(line.split(": ")[1].split()[0]) for line in printed[:5]] == rounded
    if simulator.ACTIVE:
        assert printed[5:] == [memory.NOTE]
    else:
        # Of the first one less, where an earlier test has left memory for groups of the same ranks.
        assert 0 <= of_all <= MOST_OF_A_GROUP and 0 <= further <= MOST_OF_A_GROUP and of_one < 2


def test_nothing_is_not_timed():
    with pytest.raises(InvalidCountError, match="n_repeat=0 is not possible"):
        do_bench(lambda: None, n_repeat=0)


def test_ranks_meet_before_what_prepares_a_repetition_and_before_the_repetition():
    calls = []
    named = [lambda name=name: calls.append(name) for name in ("fn", "barrier", "preamble")]
    do_bench(*named, n_warmup=2, n_repeat=3)
    assert calls == ["barrier", "preamble", "barrier", "fn"] * 5 + ["barrier"]
