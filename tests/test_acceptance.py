"""The programs of tests/acceptance run as they stand, started by themselves and by torchrun."""

import os
import subprocess
from pathlib import Path

import pytest
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
    result = subprocess.run(
        [*python(), *launcher, PROGRAMS / program],
        env={**os.environ, "PYTHONPATH": import_path()},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.count(": ok") == 2
