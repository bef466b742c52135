"""What the fused operations' kernels record of themselves."""

import os
import subprocess
import sys

import pytest
from conftest import TESTS, UNDER_TORCHRUN, import_path
from covering import EVERYTHING

from iris import simulator


@pytest.mark.skipif(UNDER_TORCHRUN, reason="starts ranks of its own; run it without torchrun")
@pytest.mark.skipif(not simulator.ACTIVE, reason="its program has as many ranks as it pleases")
@pytest.mark.parametrize("count", ["3", *(["2", "4"] if EVERYTHING else [])])
def test_every_kernel_of_every_operation_tells_what_it_moves(count):
    program = TESTS / "programs" / "traced_operations.py"
    environment = {**os.environ, "IRIS_TRACE": "1", "PYTHONPATH": import_path()}
    done = subprocess.run(
        [sys.executable, program, count], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"7 ways among {count} ranks move what they say.\n"
