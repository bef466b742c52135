"""`python -m iris info` and `python -m iris demo`, also where Triton is missing."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from conftest import UNDER_TORCHRUN, import_path
from preloaded import LIMIT_S, python
from rich.console import Console

from iris import demo, info
from iris.__main__ import commands
from iris.demo import show, steps
from iris.errors import NoGpuForRankError

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.skipif(UNDER_TORCHRUN, reason="starts processes of its own")


def run(*args, first_on_path=(), **environment):
    return subprocess.run(
        # A copy has Triton.
        [*([sys.executable] if first_on_path else python()), *args],
        env={**os.environ, "PYTHONPATH": import_path(*first_on_path), **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


@pytest.fixture
def without_triton(tmp_path):
    """A folder that makes Triton impossible to import for a Python that finds it first."""
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['triton'] = None")
    return [tmp_path]


def test_info_for_machines():
    result = run("-m", "iris", "info", "--json", IRIS_SIMULATOR="1")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["versions"]["torch"] and report["versions"]["triton"]
    assert report["simulator"] == {"active": True, "reason": "IRIS_SIMULATOR=1 is set"}
    assert report["host"] == {"name": socket.gethostname(), "by": "the boot id"}
    assert report["mapping"] == {"kind": "anonymous shared memory (memfd)", "works": True, "error": None}


def test_info_for_people():
    result = CliRunner().invoke(commands, ["info"], catch_exceptions=False)
    assert result.exit_code == 0
    for title in ("Versions", "Devices", "How kernels run here", "Missing"):
        assert title in result.output
    assert "a heap of one rank works" in result.output


def test_info_shows_the_host_that_the_environment_names():
    result = run("-m", "iris", "info", IRIS_SIMULATOR="1", IRIS_HOST="box7")
    assert "this host: box7, by IRIS_HOST\n" in result.stdout


def test_info_names_what_is_missing():
    report = info.collect()
    report["devices"] = [{}, {}]
    report["links"] = [["", "none"], ["none", ""]]
    report["versions"]["triton"] = "3.5.1"
    report["mapping"] = {"kind": "memfd", "works": False, "error": "no room"}
    found = {each["what"]: each["remedy"] for each in info.find_missing(report)}
    assert found.keys() == {
        "Triton 3.5.1 is too old",
        "a heap of one rank does not work",
        "no peer access between GPUs 0 and 1",
    }
    assert found["a heap of one rank does not work"] == "no room"


def test_without_triton_importing_says_what_to_do(without_triton):
    result = run("-c", "import iris", first_on_path=without_triton)
    assert result.returncode == 1
    assert "iris.errors.TritonMissingError: Iris needs Triton" in result.stderr
    assert "pip install" in result.stderr


def test_without_triton_info_still_runs(without_triton):
    result = run("-m", "iris", "info", first_on_path=without_triton)
    assert result.returncode == 1
    assert "Triton cannot be imported" in result.stdout
    assert "Traceback" not in result.stderr


def test_without_triton_the_demo_says_so(without_triton):
    result = run("-m", "iris", "demo", first_on_path=without_triton)
    assert result.returncode == 1
    assert result.stderr.startswith("Error: Iris needs Triton")


def test_demo():
    result = run("-m", "iris", "demo", IRIS_SIMULATOR="1")
    assert result.returncode == 0, result.stderr
    assert "2 ranks in the simulator, IRIS_SIMULATOR=1" in result.stdout
    assert result.stdout.count("✓") == len(steps.STEPS) + 1
    for prepare in steps.STEPS:
        assert prepare.__name__ in result.stdout


def test_demo_shows_wrong_data():
    right = steps.Outcome(0, "store", "Triton", "something", 64, 1.0, 0)
    wrong = replace(right, rank=1, wrong=5)
    console = Console(record=True, file=open(os.devnull, "w"), width=200)
    assert show.show_outcomes(console, [[right, replace(right, rank=1)]], simulated=True)
    assert not show.show_outcomes(console, [[right, wrong]], simulated=True)
    assert "wrong elements, by rank: {1: 5}" in console.export_text()


def test_demo_without_enough_gpus(monkeypatch):
    monkeypatch.setattr(show.simulator, "ACTIVE", False)
    monkeypatch.setattr(show.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(show.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("IRIS_SIMULATOR", "0")
    with pytest.raises(NoGpuForRankError, match="2 ranks need a GPU each, there are 1"):
        demo.run(2)
    monkeypatch.setenv("IRIS_SIMULATOR", "")
    assert show.choose_machine(2) == (True, "since they are more than the GPUs here (1)")
    assert os.environ["IRIS_SIMULATOR"] == "1"
