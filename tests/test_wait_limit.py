"""IRIS_WAIT_TIMEOUT_S: a wait that nobody ends is ended, and the host says who waited for what."""

import os
import subprocess

import pytest
from conftest import TESTS, UNDER_TORCHRUN, import_path
from covering import EVERYTHING
from preloaded import LIMIT_S, python


def run(program, limit, **kwargs):
    environment = {**os.environ, "IRIS_WAIT_TIMEOUT_S": limit, "PYTHONPATH": import_path(TESTS)}
    return subprocess.run([*python(), *program], env=environment, capture_output=True, text=True, timeout=LIMIT_S)


@pytest.mark.skipif(UNDER_TORCHRUN, reason="starts ranks of its own; run it without torchrun")
def test_a_wait_in_vain_is_reported():
    result = run([TESTS / "programs" / "wait_in_vain.py"], "2")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("found:") == 8 and "FAILED" not in result.stdout, result.stdout
    # Six groups, on both ranks; the last is the context's own, in two calls.
    assert result.stdout.count("aborted:") == 2 * 6, result.stdout
    assert result.stdout.count("sums of a new context: [2.0]") == 2 and result.stdout.count("done") == 2


@pytest.mark.parametrize("limit", ["soon", "-1", *(["inf", "nan"] if EVERYTHING else [])])
def test_a_limit_that_means_nothing_is_refused(limit):
    result = run(["-c", "import iris"], limit)
    assert result.returncode != 0
    assert "InvalidSettingError" in result.stderr and f"IRIS_WAIT_TIMEOUT_S='{limit}'" in result.stderr
