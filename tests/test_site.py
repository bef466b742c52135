"""The documentation as a site: it builds, and its search finds every public name."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import UNDER_TORCHRUN
from preloaded import LIMIT_S

import iris

ROOT = Path(__file__).parent.parent


def names():
    """What a reader looks for: of the package, of contexts on the host and in kernels, of tiles and products."""
    contexts = [iris.Iris, *([iris.DeviceContext] if iris.simulator.ACTIVE else [])]
    members = [name for context in contexts for name in dir(context) if not name.startswith("_")]
    return {*iris.__all__, *iris.gluon.__all__, *iris.x.__all__, *members, "FusedConfig", "all_gather_matmul"}


@pytest.mark.skipif(UNDER_TORCHRUN, reason="once is enough; run it without torchrun")
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed")
def test_the_site_builds_and_its_search_finds_public_names(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    # The search takes pages apart at what its separator matches, and finds words by their beginnings.
    index = json.loads((tmp_path / "search" / "search_index.json").read_text())
    separator = re.compile(index["config"]["separator"])
    words = {word.lower() for each in index["docs"] for text in each.values() for word in separator.split(text)}
    assert {name for name in names() if name.lower() not in words} == set()
    assert (tmp_path / "stylesheets" / "tables.css").exists()
