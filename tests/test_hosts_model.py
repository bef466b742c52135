"""python -m iris model hosts: arithmetic that can be checked by hand, what it says to errors, and what it draws."""

import json
import re
from dataclasses import replace

import pytest
from click.testing import CliRunner
from conftest import TESTS

from iris.__main__ import commands
from iris.bench.hosts_command import measurements
from iris.bench.hosts_model import COLLECTIVES, FUSED, Measured, collective, fused
from iris.ccl import select_over_hosts
from iris.ccl.chunks import NEXT_TRANSFER_US
from iris.ccl.cluster import Cluster, HostFigures
from iris.ccl.predict_over_hosts import LINK_GBPS, vendor
from iris.errors import InvalidTableError, InvalidValueError
from iris.ops.beside_rails import Loop, beside_stores_us

ROOT = TESTS.parent
RESULTS = ROOT / "benchmarks" / "results" / "collectives" / "collectives_4.json"
# Round numbers: 100 GB/s are 10^5 bytes a microsecond. Memory is so fast that adding takes nothing.
HOST = HostFigures(100, 100, link_GBps=LINK_GBPS, memory_GBps=1e12, small_us=0, transfer_us=0)
ROUND = Measured(HOST, stores=100, beside=80, slowed=0.5, gemm=500)
TWO, FOUR = Cluster(2, 4, 10.0), Cluster(4, 4, 10.0)
LARGE = (8192, 28672, 8192)


def with_host(measured, **figures):
    return replace(measured, host=measured.host._replace(**figures))


def exactly(expected):
    return pytest.approx(expected, rel=1e-6)


def test_an_all_gather_by_hand():
    # 8 ranks with 1 MB each. Along a rail goes 1 MB, at 10 GB/s; to 3 peers that and the own one.
    row = collective("all_gather", 8_000_000, TWO, ROUND)
    assert (row.rail, row.in_host, row.product) == (exactly(100), exactly(60), 0)
    assert row.bound == exactly(100)
    # The own part takes 30 beside the rail; the other one comes after it, and so it does where all else overlaps.
    assert row.in_steps == row.overlapped == exactly(130)
    # 7 MB of 8 through each GPU, at 4 x 10 GB/s.
    assert row.nccl_bound == exactly(175) and row.nccl == exactly(175 * 400 / 330)


def test_a_reduce_scatter_by_hand():
    row = collective("reduce_scatter", 16_000_000, FOUR, with_host(ROUND, memory_GBps=50))
    # 3 parts of 1 MB along the rail; 3 of 4 parts of 16 MB to peers; 4 parts read and one written.
    assert (row.rail, row.in_host) == (exactly(300), exactly(120 + 100))
    # The own host's part is added up beside the rail, those of 3 others before it.
    assert row.in_steps == exactly(300 + 90 + 100) and row.overlapped == exactly(300 + 220 / 4)
    assert row.nccl == exactly(375 * 400 / 320)


def test_an_all_reduce_by_hand():
    row = collective("all_reduce", 16_000_000, FOUR, ROUND)
    assert (row.rail, row.in_host) == (exactly(600), exactly(240))
    assert row.overlapped == exactly(600 + 240 / 8) and row.bound == exactly(600)
    # Twice 300 along the rail beside the own part, and the three others.
    assert row.in_steps == exactly(2 * (300 + 90))
    assert row.nccl_bound == exactly(2 * 15 / 40 * 1000)


def test_an_all_reduce_on_two_hosts_is_nccls_by_trees():
    cluster, nbytes = Cluster(2, 8, 50.0), 256 << 20
    bus_bytes = 2 * 15 / 16 * nbytes
    assert vendor("all_reduce", nbytes, cluster, HOST) == (exactly(bus_bytes / 480e3), exactly(bus_bytes / 430e3))
    # A slow network carries 1 / 8 of it each way, which is less than in rings.
    assert vendor("all_reduce", nbytes, Cluster(2, 8, 5.0), HOST) == (exactly(nbytes / 8 / 5e3),) * 2
    assert vendor("all_reduce", nbytes, Cluster(4, 8, 50.0), HOST).at_best == exactly(2 * 31 / 32 * nbytes / 370e3)


def test_a_fused_operation_by_hand():
    # 16 ranks: A is 16 MB, of which each has 1 MB, and each multiplies 1 / 16.
    shape = (1600, 1600, 5000)
    row = fused("all_gather_matmul", shape, FOUR, ROUND)
    product = 2 * 1600 * 1600 * 5000 / 16 / 500e6
    assert (row.rail, row.in_host, row.product) == (exactly(300), exactly(120), exactly(product)) and product == 3.2
    # Beside the product stores take 150, and it is done meanwhile.
    # By hosts: three transfers of 100 each, of which two have to start after others, and the last part after them.
    assert row.overlapped == exactly(300 + 150 / 4) and row.in_steps == exactly(row.overlapped + 2 * NEXT_TRANSFER_US)
    assert row.nccl_bound == exactly(375 + product)


@pytest.mark.parametrize(
    ("network", "expected"),
    # A part takes 1000, and 375 longer on 96 of 132 multiprocessors. A transfer takes 1000 / network.
    [(0.5, 3 * 2000 + 2 * NEXT_TRANSFER_US + 1000), (2.5, 3 * 1375 + 1000), (4, 3 * 250 + 4 * 1000)],
)
def test_a_product_runs_beside_rails_where_it_loses_less_than_they_take(network, expected):
    # One rank a host: 4 have 1 MB each of A, and nothing is stored to peers.
    shape = 4 * 500, 4 * 250_000, 1000
    measured = replace(ROUND, gemm=250)
    row = fused("all_gather_matmul", shape, Cluster(4, 1, network), measured)
    assert row.in_steps == exactly(expected)


def test_a_product_is_slowed_while_stores_last():
    assert beside_stores_us(100, 30, 0.5) == 100
    assert beside_stores_us(100, 80, 0.5) == 130  # 50 of it are done in 100
    # On 96 of 132 multiprocessors the latter takes 110, of which 60 come after the stores; the former is done by then.
    assert Loop(200, 160, 0.5, 0).lost_us(2) == exactly(30) and Loop(200, 60, 0.5, 0).lost_us(2) == 0


def test_the_example_of_a_large_layer_on_two_hosts_of_eight():
    """Stores at 361 GB/s, and a GEMM of 781 TFLOPS: 168, 325 and 308 us; 335 us are stores at 350 GB/s."""
    measured, _ = measurements("NVIDIA H200", None)
    row = fused("all_gather_matmul", LARGE, Cluster(2, 8, 50.0), replace(measured, stores=361.3, gemm=781))
    assert (round(row.rail), round(row.in_host), round(row.product)) == (168, 325, 308)
    assert round(row.bound) == 325 and round(row.in_host * 361.3 / measured.stores) == 336
    # NCCL's all_gather at the 370 GB/s of its rings takes 340.
    assert round(row.nccl_bound) == 340 + 308
    other = fused(
        "matmul_reduce_scatter", LARGE, Cluster(2, 8, 50.0), with_host(replace(measured, stores=361), memory_GBps=1e12)
    )
    assert (round(other.rail), round(other.in_host)) == (587, 1139)


CALLS = [
    *[(name, lambda name, *rest: collective(name, 256 << 20, *rest)) for name in COLLECTIVES],
    *[(name, lambda name, *rest: fused(name, LARGE, *rest)) for name in FUSED],
]


@pytest.mark.parametrize(("name", "predict"), CALLS)
@pytest.mark.parametrize("hosts", [2, 4, 8])
def test_what_holds_of_all_of_them(name, predict, hosts):
    measured, _ = measurements("NVIDIA H200", RESULTS)
    row = predict(name, Cluster(hosts, 8, 50.0), measured)
    assert max(row.rail, row.in_host, row.product) == row.bound <= row.overlapped <= row.in_steps * (1 + 1e-9)
    assert row.nccl_bound <= row.nccl and row.gain == row.nccl_bound / row.bound
    # A faster network makes nothing slower; from some rate on Iris gains nothing, as its own links bound it.
    times = [predict(name, Cluster(hosts, 8, rate), measured) for rate in (5.0, 25.0, 50.0, 100.0, 1e6, 1e9)]
    for field in ("rail", "bound", "overlapped", "in_steps", "nccl_bound", "nccl"):
        values = [getattr(each, field) for each in times]
        assert values == sorted(values, reverse=True), field
    assert times[-1].bound == times[-2].bound == max(row.in_host, row.product)
    # Of one GPU a host nothing goes to peers.
    alone = predict(name, Cluster(hosts, 1, 50.0), with_host(measured, memory_GBps=1e15))
    assert alone.in_host == pytest.approx(0, abs=1e-3)


def invoke(*options):
    return CliRunner().invoke(commands, ["model", "hosts", *map(str, options)])


def test_the_command_prints_a_table_and_draws(tmp_path):
    result = invoke("--hosts", "2,4", "--sizes", "64,256", "--out", tmp_path / "hosts.svg", "--results", RESULTS)
    assert result.exit_code == 0, result.output
    assert (
        "all_reduce" in result.output and "No network was." in result.output and "collectives_4.json" in result.output
    )
    picture = (tmp_path / "hosts.svg").read_text()
    assert picture.lstrip().startswith("<?xml") and "Date" not in picture.split("</metadata>")[0]
    assert "table of NVIDIA H200" in invoke().output and "products 800" in invoke("--gemm", 800).output


def test_without_measured_collectives_those_of_the_table_count():
    from_table, from_results = (measurements("NVIDIA H200", results)[0] for results in (None, RESULTS))
    rows = json.loads(RESULTS.read_text())["rows"]
    assert from_table.host.all_gather_GBps == from_table.host.reduce_scatter_GBps == 290
    for name in ("all_gather", "reduce_scatter"):
        (rate,) = [
            row["bus_GBps"]
            for row in rows
            if (row["collective"], row["library"], row["sms"], row["bytes"]) == (name, "iris", 0, 256 << 20)
        ]
        assert getattr(from_results.host, f"{name}_GBps") == rate
    assert from_table.stores == from_results.stores == 350


def test_the_documentation_has_what_its_command_prints(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "several-hosts.md").read_text()
    (command,) = re.findall(r"python -m iris (model hosts .*)", page)
    # From the root of a clone, but for what it writes.
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(commands, command.split())
    table = result.stdout
    assert result.exit_code == 0 and len(table.splitlines()) == 2 + 3 * 5
    assert f"\n\n{table}\n" in page
    assert (tmp_path / "docs" / "images" / "performance" / "hosts.svg").stat().st_size


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("hosts", [2, 3, 4])
def test_the_model_and_the_choice_compute_the_same(name, hosts):
    """What is chosen between are the model's steps, and NCCL, with the latency that the model leaves out."""
    found = select_over_hosts.as_found(hosts, 8, "NVIDIA H200")
    ours, theirs = found.predicted_us(name, 256 << 20)
    measured, _ = measurements("NVIDIA H200", None)
    row = collective(name, 256 << 20, found.cluster, measured)
    assert found.cluster == Cluster(hosts, 8, 50.0) and measured.host == found.host
    assert theirs - found.host.transfer_us == exactly(row.nccl if name == "all_reduce" else row.nccl_bound)
    assert ours == row.in_steps


def test_the_gpu_of_the_results_counts(tmp_path):
    file = tmp_path / "results.json"
    content = json.loads(RESULTS.read_text())
    file.write_text(json.dumps(content | {"device": "NVIDIA H100 80GB HBM3"}))
    result = invoke("--results", file)
    assert "memory 3350 GB/s" in " ".join(result.output.split()) and "4 x NVIDIA H100" in result.output
    assert "memory 4917 GB/s" in " ".join(invoke("--device", "another").output.split())
    assert "as nobody has measured another" in invoke("--device", "another").output
    result = invoke("--results", file, "--device", "NVIDIA H200")
    assert result.exit_code == 1 and "was measured on NVIDIA H100 80GB HBM3, and --device is" in result.output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--hosts", "1"], "whole numbers from 2 on"),
        *[
            ([option, value], f"'{option}': '{value}' is not possible; it takes a number above 0, up to 1e+06")
            for option, value in [("--network", "0"), ("--network", "nan"), ("--stores", "inf"), ("--gemm", "-1")]
        ],
        (["--network", "fast"], "'fast' is not possible"),
        (["--hosts", "2147483648"], "whole numbers from 2 on, up to 2147483647"),
        (["--gpus-per-host", "0"], "--gpus-per-host"),
        (["--shape", "8192x8192"], "3 whole numbers"),
        (["--shape", "8192x8200x8192"], "N=8200 is no multiple of 16"),
        (["--sizes", "0"], "whole numbers from 1 on"),
        (["--out", "hosts.xyz"], "does not end in one of"),
        (["--results", "nowhere.json"], "does not exist"),
    ],
)
def test_what_means_nothing_is_refused(options, said):
    result = invoke(*options)
    assert result.exit_code and said in " ".join(result.output.split())


ROW = {"collective": "all_gather", "library": "iris", "sms": 0, "bytes": 8, "bus_GBps": 300.0}
FILE = {"device": "NVIDIA H200", "num_ranks": 4, "rows": [ROW, ROW | {"collective": "reduce_scatter"}]}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[", "is no file of results"),
        ([], "is no file of results"),
        (FILE | {"rows": 3}, "is no file of results: it has no rows"),
        (FILE | {"rows": []}, "has no all_gather of Iris at its own choice"),
        (FILE | {"rows": [ROW, ROW | {"sms": 32, "collective": "reduce_scatter"}]}, "has no reduce_scatter of Iris"),
        (FILE | {"rows": [ROW, {**ROW, "bytes": None}]}, "has all_gather with bytes=None and bus_GBps=300.0, which"),
        (FILE | {"rows": [ROW | {"bytes": 10**400}]}, "has all_gather with bytes=10+"),
        (FILE | {"rows": [ROW | {"bus_GBps": float("nan")}]}, ".*with bytes=8 and bus_GBps=nan, which are"),
        (FILE | {"num_hosts": 2}, "was measured over 2 hosts, and what is within one counts"),
        (FILE | {"num_ranks": 1}, "was measured on 1 ranks, and a link takes two"),
        (FILE | {"device": "simulator on x86_64"}, "was measured on 'simulator on x86_64', whose times say nothing"),
    ],
)
def test_results_that_say_nothing_of_a_host_are_refused(content, said, tmp_path):
    file = tmp_path / "r.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(InvalidTableError, match=f"{file} {said}.*--results takes what was measured on several GPUs"):
        measurements(None, file)
    assert invoke("--results", file).exit_code == 1


def test_a_shape_that_ranks_cannot_share_names_what_is_wrong():
    with pytest.raises(InvalidValueError, match=r"K=100 is no multiple of 16\. Use another shape, or fewer hosts"):
        fused("matmul_reduce_scatter", (1600, 7, 100), FOUR, ROUND)
