"""What kernels tell the host: with IRIS_DEBUG=1, pointers that are not in their context's heap."""

import os
import subprocess

import pytest
from conftest import TESTS, UNDER_TORCHRUN, import_path
from preloaded import LIMIT_S, python


@pytest.mark.skipif(UNDER_TORCHRUN, reason="starts ranks of its own; run it without torchrun")
def test_a_kernel_that_reaches_a_peer_by_a_foreign_pointer_is_reported():
    environment = {**os.environ, "IRIS_DEBUG": "1", "PYTHONPATH": import_path(TESTS)}
    program = TESTS / "programs" / "reach_elsewhere.py"
    result = subprocess.run([*python(), program], env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert result.returncode == 0, result.stderr
    assert "FAILED" not in result.stdout, result.stdout
    assert result.stdout.count("found:") == 2 * 6 and result.stdout.count("done") == 2
