"""The benchmarks and the tuning over several hosts: what is measured there, how it is named, and what is refused."""

import contextlib
import io
import json

import pytest
import torch
from covering import EVERYTHING
from rank_pool import Hosts

from iris.bench import ccl_command, collectives, memory, ops_command, plots, tune
from iris.bench.repetitions import OFTEN, SELDOM
from iris.ccl.select_over_hosts import as_found
from iris.errors import SeveralHostsError

KIB = 1 << 10
# Of a product.
SHAPE = (32, 16, 32)


def measured_over_hosts(ctx):
    chosen, libraries = list(collectives.COLLECTIVES), ["iris", "iris steps"]
    rows = list(collectives.measure(ctx, chosen, [2 * KIB], [0], libraries, torch.float32))
    assert [(row.collective, row.library) for row in rows] == [(name, each) for name in chosen for each in libraries]
    assert all(row.microseconds > 0 and row.reason == "" for row in rows)
    return rows


@pytest.mark.ranks(*([Hosts(2, 2)] if EVERYTHING else []), Hosts(4, 1))
def test_collectives_are_measured_over_hosts(ranks, tmp_path):
    rows = ranks.run(measured_over_hosts)[0]
    num_ranks, (hosts, each, _) = ranks.num_ranks, ranks.hosts
    collectives.write(tmp_path, num_ranks, rows, {}, hosts)
    written = json.loads((tmp_path / f"collectives_float32_{hosts}x{each}.json").read_text())
    assert [written[name] for name in ("num_ranks", "num_hosts", "ranks_per_host")] == [num_ranks, hosts, each]
    # Pictures by numbers of ranks are of one host.
    assert plots.draw_by_ranks(tmp_path, rows[0].dtype) == []


def run_over_hosts(ctx, folder):
    """What can be measured has results of this many hosts and ranks; what cannot is refused on every rank."""
    sizes = [KIB]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        for library, sms in (("iris", 8), ("iris steps", 8), ("iris gluon", 0)):
            with pytest.raises(SeveralHostsError, match=f"{'--sms 8 of ' if sms else ''}--library '{library}'"):
                ccl_command.run_on_rank(["broadcast"], (library,), "float32", sizes, (sms,), None, None)
        with pytest.raises(SeveralHostsError, match="--library 'torch'"):
            ops_command.run_on_rank(["matmul_all_reduce"], ("torch",), "float32", [SHAPE], {}, None, None)
        floors = folder / "floors.json"
        if ctx.cur_rank == 0:
            floors.write_text("{}")
        ctx.barrier()
        assert ccl_command.run_on_rank(["broadcast"], (), "float32", sizes, (0,), floors, folder) == []
        products, pictures = ["all_gather_matmul", "matmul_all_reduce"], {"operations": [SHAPE]}
        assert ops_command.run_on_rank(products, (), "float32", [SHAPE], pictures, floors, folder) == []
        wanted = ("iris beside rails", "iris in turn")
        both = folder / "both"
        assert ops_command.run_on_rank(["all_gather_matmul"], wanted, "float32", [SHAPE], pictures, None, both) == []
        assert memory.run_on_rank(1, folder / "memory.json") == []
    name = f"{ctx.num_hosts}x{ctx.num_local_ranks}"
    for benchmark in ("ccl", "ops"):
        assert (f"no floors of {benchmark} for {name} ranks" in said.getvalue()) == (ctx.cur_rank == 0)
    ctx.barrier()
    return {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*.json")}


@pytest.mark.ranks(Hosts(2, 2))
def test_commands_over_hosts(ranks, tmp_path):
    texts, *_ = ranks.run(run_over_hosts, tmp_path)
    num_ranks, (hosts, each, _) = ranks.num_ranks, ranks.hosts
    libraries = {
        "collectives_float32": {"iris", "iris steps"},
        "operations_float32": {"iris", "iris triton"},
        "both/operations_float32": {"iris beside rails", "iris in turn"},
    }
    for written in map(json.loads, texts.values()):
        if written:  # but for the floors, of which there are none
            assert [written[name] for name in ("num_ranks", "num_hosts", "ranks_per_host")] == [num_ranks, hosts, each]
    assert {"memory.json", "floors.json"} < texts.keys()
    for benchmark, measured in libraries.items():
        written = json.loads(texts[f"{benchmark}_{hosts}x{each}.json"])
        assert {row["library"] for row in written["rows"]} >= measured
        # No time is given without a reason, and the library's own choice has one.
        assert all(bool(row["microseconds"]) != bool(row["reason"]) for row in written["rows"])
        assert all(row["microseconds"] for row in written["rows"] if row["library"] == "iris")


@pytest.mark.parametrize(
    ("usual", "us", "expected"),
    [
        (OFTEN, 50, (20, 25, 200)),  # as on one host
        (OFTEN, 400, (20, 25, 62)),
        (SELDOM, 5000, (4, 15, 15)),
        (SELDOM, 30_000, (1, 15, 15)),
        (SELDOM, 100_000, (1, 5, 5)),
        (SELDOM, 2_000_000, (1, 3, 1)),  # what a slow network takes for 256 MiB
    ],
)
def test_what_takes_long_over_hosts_is_measured_less_often(usual, us, expected):
    assert usual.fewer(us) == expected


def tuned_over_hosts(ctx):
    lines = []
    table = tune.tune_over_hosts(ctx, [KIB, 4 * KIB], lines.append)
    assert all(line.count(" us") == 2 and "vendor" in line for line in lines)
    return table


@pytest.mark.ranks(Hosts(2, 2))
def test_over_hosts_the_vendor_is_measured_beside_the_steps(ranks, tmp_path, monkeypatch):
    first, *others = ranks.run(tuned_over_hosts)
    assert all(table == first for table in others), "ranks would choose differently"
    assert first.keys() == {*collectives.COLLECTIVES}
    for rows in first.values():
        assert rows[-1].limit is None and {row.variant for row in rows} <= {"iris", "vendor"}
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "iris").mkdir()
    tune.write(tmp_path / "iris" / "collectives.json", first, "a GPU", "2x2")
    assert as_found(2, 2, "a GPU").table == first
