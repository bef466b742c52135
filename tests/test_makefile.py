"""The targets of the Makefile that take settings: what they would run."""

import os
import re
import shutil
import subprocess

import pytest
from conftest import TESTS

ROOT = TESTS.parent
OF_MAKE = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "RANKS", "HOSTS"}

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def printed(*arguments):
    """What make would run, or its error; of none of the settings that this process was started with."""
    environment = {name: value for name, value in os.environ.items() if name not in OF_MAKE}
    command = ["make", "--dry-run", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    return done.stdout if done.returncode == 0 else done.stderr


@pytest.mark.parametrize(
    ("settings", "hosts", "number"),
    [
        ([], "2x1", 2),
        (["RANKS=4"], "4x1", 4),
        (["HOSTS=2x4"], "2x4", 8),
        (["HOSTS=3x2dealt"], "3x2dealt", 6),
        (["HOSTS=2x4", "RANKS=2"], "2x4", 8),
    ],
)
def test_as_many_ranks_are_started_as_hosts_have(settings, hosts, number):
    on_gpus, on_late_rails = printed("test-hosts", *settings).splitlines()
    assert re.search(rf"IRIS_TEST_HOSTS={hosts} .* --nproc-per-node {number} -m pytest", on_gpus)
    assert "IRIS_SIMULATOR=1 IRIS_TEST_LATE_RAILS=1" in on_late_rails and "torch.distributed.run" not in on_late_rails
    # The same tests, all of which are there.
    files = re.findall(r"tests/\S+\.py", on_gpus)
    assert files == re.findall(r"tests/\S+\.py", on_late_rails) and all((ROOT / file).exists() for file in files)


@pytest.mark.parametrize("hosts", ["two", "2x0"])
def test_hosts_that_are_none_are_refused(hosts):
    assert f"HOSTS={hosts} is no number of hosts and ranks on each: 2x4" in printed("test-hosts", f"HOSTS={hosts}")


@pytest.mark.parametrize("target", ["test-gpu", "perf-accesses", "perf-collectives", "perf-operations", "perf-experts"])
def test_other_targets_take_the_number_of_ranks(target):
    assert "--standalone --nproc-per-node 3 " in printed(target, "RANKS=3")
