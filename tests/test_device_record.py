"""What kernels tell the host: with IRIS_DEBUG=1, pointers that are not in their context's heap."""

import os
import subprocess
import sys

import pytest
from conftest import TESTS, UNDER_TORCHRUN, import_path


@pytest.mark.skipif(UNDER_TORCHRUN, reason="starts ranks of its own; run it without torchrun")
def test_a_kernel_that_reaches_a_peer_by_a_foreign_pointer_is_reported():
    environment = {**os.environ, "IRIS_DEBUG": "1", "PYTHONPATH": import_path(TESTS)}
    program = TESTS / "programs" / "reach_elsewhere.py"
    result = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, timeout=150)
    assert result.returncode == 0, result.stderr
    assert "FAILED" not in result.stdout, result.stdout
    assert result.stdout.count("found:") == 2 * 6 and result.stdout.count("done") == 2
