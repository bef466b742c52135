"""Programs as others write them run on the backend: `programs/drop_in.py`, which on GPUs is for the command line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import UNDER_TORCHRUN, import_path
from preloaded import LIMIT_S

PROGRAM = Path(__file__).parent / "programs" / "drop_in.py"


@pytest.mark.thorough
@pytest.mark.skipif(UNDER_TORCHRUN, reason="starts ranks of its own; run it without torchrun")
def test_each_part_is_right():
    pytest.importorskip("transformers", "5.24")
    pytest.importorskip("accelerate")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", PROGRAM],
        env={**os.environ, "PYTHONPATH": import_path()},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    parts = [line.partition(": right")[0] for line in done.stdout.splitlines() if ": right" in line]
    assert parts[0] == "objects" and parts[-1] == "transformers" and len(parts) == 12, done.stdout
