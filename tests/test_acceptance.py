"""The programs of tests/acceptance run as they stand, started by themselves and by torchrun."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton
from conftest import UNDER_TORCHRUN, import_path
from preloaded import LIMIT_S, python

PROGRAMS = Path(__file__).parent / "acceptance"

pytestmark = pytest.mark.skipif(UNDER_TORCHRUN, reason="starts ranks of its own; run it without torchrun")


@pytest.mark.parametrize("program", ["quick_start_triton.py", "producer_consumer_gluon.py"])
@pytest.mark.parametrize(
    "launcher",
    [[], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]],
    ids=["alone", "torchrun"],
)
def test_program(program, launcher):
    # One starts as people start it, by the newest Triton, and in `make test-all` all do.
    copied = launcher or "gluon" in program or triton.__version__.startswith("3.6.")
    start = python() if copied else [sys.executable]
    result = subprocess.run(
        [*start, *launcher, PROGRAMS / program],
        env={**os.environ, "PYTHONPATH": import_path()},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.count(": ok") == 2
