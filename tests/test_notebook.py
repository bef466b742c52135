"""The notebook of the docs runs where there is no Jupyter and no GPU, and prints what it says."""

import os
import subprocess
from pathlib import Path

import pytest
from conftest import UNDER_TORCHRUN, import_path
from preloaded import LIMIT_S, python

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(UNDER_TORCHRUN, reason="starts ranks of its own; run it without torchrun")
def test_the_notebook_prints_what_it_says():
    environment = {name: value for name, value in os.environ.items() if not name.startswith("IRIS_")}
    done = subprocess.run(
        [*python(), str(ROOT / "scripts" / "notebook.py"), str(ROOT / "docs" / "notebook.ipynb")],
        env={**environment, "IRIS_SIMULATOR": "1", "PYTHONPATH": import_path()},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
