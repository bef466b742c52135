"""``python -m iris bench`` and ``tune``: what their options take, the ranks that they start, and what they show."""

import json
import os
import shlex
import subprocess

import pytest
from click.testing import CliRunner
from conftest import UNDER_TORCHRUN, import_path
from covering import EVERYTHING
from preloaded import LIMIT_S, python

from iris.__main__ import commands
from iris.bench import (
    ccl_command,
    collectives,
    experts,
    experts_command,
    model_command,
    operations,
    ops_command,
    report,
)
from iris.bench import ranks as ranks_of_a_bench
from iris.bench.model import measure

KIB = 1 << 10


@pytest.mark.parametrize(
    ("command", "words"),
    [("ccl --library 'iris steps'", "measures the steps that Iris has over several hosts, and these ranks are on one"),
     ("ccl --sizes 8,a", "'8,a' is not possible; it takes numbers of KiB with ',' between"),
     ("ccl --sizes 1.0001", "of whole bytes"), ("ccl --sizes 0", "of whole bytes"), ("ccl --sizes inf", "up to"),
     ("ccl --sms -1", "whole numbers from 0 on"), ("ops --shape 8x8", "3 whole numbers from 0 on, with 'x' between"),
     ("ops --dtype half", "'half' is not one of 'float16'"), ("ccl --dtype float8_e4m3fn", "is not one of 'float16'"),
     ("ccl --library nccl --sms 4", "in the simulator that is Gloo, which takes none"),
     ("model --way gloo", "--way='gloo' is not possible; it takes one of 'nccl'"),
     ("model -r 4", "--model tiny cannot be measured: 4 ranks cannot share its kv_heads, 6"),
     ("model --prompts 3 --context 5", "cannot be measured: 2 ranks cannot share the 15 tokens of 3 prompts"),
     ("ccl --library torch", "--library 'torch' measures memory that GPUs share, and the simulator has none"),
     ("ccl --library iris --library 'nccl windows'", "--library 'nccl windows' measures memory that GPUs share"),
     ("model --way 'nccl all-to-all'", "nccl all-to-all is for training a mixture of experts. Give --mode train"),
     ("model --mode train --way 'nccl all-to-all'", "Nothing to measure: nccl all-to-all is for training"),
     *((f"{command} --out {__file__}", "is a file") for command in ("ccl", "ops", "experts", "model")),
     (f"ops --floors {__file__}", "is not JSON that can be read: "), ("ccl --floors /", "is a directory")],
)  # fmt: skip
def test_options_that_make_no_sense(command, words, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(ranks_of_a_bench.simulator, "ACTIVE", True)
    result = CliRunner().invoke(commands, ["bench", *shlex.split(command)])
    assert result.exit_code in (1, 2) and words in " ".join(result.output.split())


@pytest.mark.parametrize(
    "floors", [[], 3, {"device": 3}, {"device": {"ccl": {"2": 3}}}, {"device": {"ccl": {"2": {"a_us": "3"}}}}], ids=str
)
def test_floors_that_are_none_are_told_before_anything_is_measured(floors, tmp_path, monkeypatch):
    monkeypatch.setattr(ranks_of_a_bench, "run", lambda *args: pytest.fail("measures"))
    file = tmp_path / "floors.json"
    file.write_text(json.dumps(floors))
    for command in ("ccl", "ops", "experts"):
        result = CliRunner().invoke(commands, ["bench", command, "--floors", str(file)])
        assert result.exit_code == 2 and "has no floors. They are numbers by device" in " ".join(result.output.split())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_is_compared_with_floors_is_of_bf16(dtype):
    sum_ = collectives.Row("all_reduce", dtype, 1536, 0, "iris", 4.5, 1.0)
    product = operations.Row("matmul_all_reduce", 8, 16, 32, dtype, "iris", 5.5)
    pair = experts.Row(8, 256, 12, 2, dtype, "compact", 0, experts.FP8, 6.5, 7.5, 1.0)
    found = ccl_command.figures([sum_]), ops_command.figures([product]), experts_command.figures([pair])
    names = "all_reduce_1.5KiB_us", "matmul_all_reduce_8x16x32_us", "pair_8x256_us"
    of_bf16 = tuple({name: time} for name, time in zip(names, (4.5, 5.5, 6.5), strict=True))
    assert found == (of_bf16 if dtype == "bfloat16" else ({}, {}, {}))


SAID = "RuntimeError: [/gloo/pair.cc:525] closed, [red]"


@pytest.mark.parametrize(
    "command, row",
    [
        (ccl_command, collectives.Row("all_gather", "bfloat16", KIB, 0, "nccl", None, None, SAID)),
        (ops_command, operations.Row("matmul_all_gather", 8, 8, 8, "bfloat16", "torch", None, SAID)),
        (ops_command, operations.Row("matmul_all_gather", 8, 8, 8, "bfloat16", "torch", None,
                                     operations.NOT_AVAILABLE + SAID)),
        (experts_command, experts.Row(8, 8, 8, 1, "bfloat16", "", 0, "torch", None, None, None, SAID)),
        (model_command, measure.Row("tiny", 1, "decode", 1, 8, "bfloat16", "nccl", None, None, None, None, SAID)),
    ],
)  # fmt: skip
def test_what_a_library_says_is_shown_as_it_is(command, row, capsys):
    command.show([row])
    assert SAID in " ".join(capsys.readouterr().out.replace("│", "").split())


def started(*arguments):
    """The command where no ranks are, and two can be started."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [*python(), "-m", "iris", *map(str, arguments)],
        env={**environment, "PYTHONPATH": import_path(), "IRIS_SIMULATOR": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


@pytest.mark.skipif(UNDER_TORCHRUN, reason="starts ranks of its own")
def test_a_benchmark_starts_its_ranks(tmp_path):
    """Two in the simulator; a figure that misses its floor on them is the command's error."""
    floors = tmp_path / "floors.json"
    bounds = {"matmul_all_reduce_32x16x32_us": 0}
    floors.write_text(json.dumps({report.environment()["device"]: {"ops": {"2": bounds}}}))
    what = "--operation", "matmul_all_reduce", "--library", "iris", "--shape", "32x16x32"
    result = started("bench", "ops", *what, "--floors", floors, "--out", tmp_path)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "Error: matmul_all_reduce_32x16x32_us is " in result.stderr and "its bound is 0" in result.stderr
    written = json.loads((tmp_path / "operations_2.json").read_text())
    assert written["num_ranks"] == 2 and len(written["rows"]) == 1
    assert "torchrun --nproc-per-node 2 -m iris bench ops" in written["command"]


@pytest.mark.skipif(UNDER_TORCHRUN, reason="starts ranks of its own")
@pytest.mark.skipif(not EVERYTHING, reason="starts ranks as the one above does")
@pytest.mark.parametrize(
    "command", ["tune --smallest 1 --largest 1", "bench ccl --collective broadcast --library iris --sizes 1"]
)
def test_other_measurements_start_as_many_as_they_are_told(command, tmp_path):
    result = started(*command.split(), "--num-ranks", 1, "--out", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    assert "broadcast" in result.stdout
    if command.startswith("tune"):
        (file,) = (tmp_path / "out").iterdir()
        assert list(json.loads(file.read_text())["simulator"]) == ["1"]
        assert "stay as they are: the simulator's times say nothing about a GPU" in result.stdout
    else:
        assert (tmp_path / "out" / "collectives_1.json").exists()


@pytest.mark.parametrize(
    ("options", "simulated", "sizes"),
    [
        ("", False, [8 << i for i in range(16)]),
        ("", True, [8, 16, 32, 64, 128]),
        ("--smallest 1 --largest 1", True, [1]),
        ("--smallest 3 --largest 13", False, [3, 6, 12]),
    ],
)
def test_sizes_that_are_tuned(options, simulated, sizes, monkeypatch):
    given = []
    monkeypatch.setattr(ranks_of_a_bench.simulator, "ACTIVE", simulated)
    monkeypatch.setattr(ranks_of_a_bench, "number", lambda asked: asked)
    monkeypatch.setattr(ranks_of_a_bench, "run", lambda num_ranks, work, sizes, out: given.append(sizes))
    assert CliRunner().invoke(commands, ["tune", *options.split()]).exit_code == 0
    assert given == [[size * KIB for size in sizes]]


def test_the_largest_size_is_no_less_than_the_smallest():
    result = CliRunner().invoke(commands, ["tune", "--smallest", "8", "--largest", "4"])
    assert result.exit_code == 2 and "--largest 4 is less than --smallest 8; give 8 or more" in result.output


@pytest.mark.parametrize(("gpus", "asked", "words"), [(0, "", "cannot start any: there are 0 GPUs"),
                                                      (2, "-r 3", "cannot start 3: there are 2 GPUs")])  # fmt: skip
@pytest.mark.parametrize("command", ["bench ccl", "bench ops", "bench memory", "tune"])
def test_ranks_that_cannot_be_started(command, gpus, asked, words, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(ranks_of_a_bench.simulator, "ACTIVE", False)
    monkeypatch.setattr(ranks_of_a_bench.torch.cuda, "device_count", lambda: gpus)
    result = CliRunner().invoke(commands, [*command.split(), *asked.split()])
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())


def test_every_gpu_is_a_rank(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(ranks_of_a_bench.simulator, "ACTIVE", False)
    monkeypatch.setattr(ranks_of_a_bench.torch.cuda, "device_count", lambda: 4)
    assert [ranks_of_a_bench.number(asked) for asked in (None, 2)] == [4, 2]
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert ranks_of_a_bench.number(2) == 8


@pytest.mark.parametrize("size", [None, "", "two"])
def test_a_rank_of_no_number_of_ranks_is_told(size, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if size is not None:
        monkeypatch.setenv("WORLD_SIZE", size)
    result = CliRunner().invoke(commands, ["bench", "memory"])
    said = f"RANK=0 says that a launcher has started this as a rank, and WORLD_SIZE={size or ''!r} is no number"
    assert result.exit_code == 2 and said in " ".join(result.output.split())
