"""`make test-all` runs in pieces, and goes on with those that have not passed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts/in_pieces.py"

MANY = """
import pathlib
import warnings

import pytest

warnings.warn("Test: test_many.py::test_counts, which is named here too")

@pytest.mark.parametrize("number", range(50))
def test_counts(number):
    with open("ran", "a") as file:
        print(number, file=file)
    assert number != 45 or pathlib.Path("mended").exists()
"""


def run(folder, *arguments):
    command = [sys.executable, str(SCRIPT), *arguments]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # they take longer than these tests
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    ran = folder / "ran"
    numbers = list(map(int, ran.read_text().split())) if ran.exists() else []
    ran.unlink(missing_ok=True)
    return ended.returncode, numbers, ended.stdout + ended.stderr


@pytest.mark.thorough  # by whom alone tests are run in pieces
def test_what_has_passed_is_not_run_again_before_something_changes(tmp_path):
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    (tmp_path / ".gitignore").write_text("ran\nmended\n.pieces\n__pycache__\n.pytest_cache\n")
    (tmp_path / "test_many.py").write_text(MANY)
    (tmp_path / "test_other.py").write_text("def test_passes():\n    pass\n")

    status, numbers, text = run(tmp_path, ".")
    assert (status, numbers) == (1, list(range(50)))
    assert (
        "1 of 3 pieces failed:\npiece 2 of 3, 10 tests from test_many.py::test_counts[40]: pytest ended with 1" in text
    )

    (tmp_path / "mended").touch()  # which git does not know, so the sources are what they were
    status, numbers, text = run(tmp_path, ".")
    assert (status, numbers) == (0, list(range(40, 50)))
    assert "piece 1 of 3, 40 tests from test_many.py::test_counts[0]: passed before" in text

    (tmp_path / "test_other.py").write_text("def test_passes():\n    assert True\n")
    assert run(tmp_path, ".")[:2] == (0, list(range(50)))


def test_tests_that_cannot_be_collected_are_an_error(tmp_path):
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    (tmp_path / "test_broken.py").write_text("import nothing_of_this_name\n")
    status, _, text = run(tmp_path, ".")
    assert status == 1
    assert "nothing_of_this_name" in text and "cannot be collected" in text
