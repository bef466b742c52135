"""torch finds the backend of an installed Iris by its entry points."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from conftest import import_path
from preloaded import LIMIT_S

ROOT = Path(__file__).parents[2]

# By when torch looks them up: whenever it is imported, or when a program first names a backend.
ENTRY_POINTS = {"torch.backends": '"iris" in dist.Backend.backend_list', "torch.distributed.backends": "True"}


@pytest.mark.parametrize("group", ENTRY_POINTS)
def test_an_installed_iris_is_known_without_an_import(tmp_path, group):
    """As pip would, with the entry point of the project's file; Iris itself is imported by the first group."""
    if group == "torch.distributed.backends" and not hasattr(dist.Backend, "_ensure_backend_registered"):
        pytest.skip("torch looks for these from 2.14 on")
    project = (ROOT / "pyproject.toml").read_text()
    entry = re.search(rf'^\[project.entry-points."{group}"\]\n(.*)', project, re.M)[1]
    installed = tmp_path / "iris_rma-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: iris-rma\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(f"[{group}]\n" + entry.replace('"', ""))
    program = f"""
import sys, torch, torch.distributed as dist
assert {ENTRY_POINTS[group]} and "iris" not in sys.modules
store = dist.HashStore()
dist.init_process_group("cuda:iris", store=store, rank=0, world_size=1)
dist.all_reduce(x := torch.ones(3))
assert x.tolist() == [1.0] * 3 and dist.get_backend_config() == "cuda:iris"
dist.destroy_process_group()
"""
    autoload = "1" if group == "torch.backends" else "0"
    environment = {
        **os.environ,
        "PYTHONPATH": import_path(tmp_path),
        "IRIS_SIMULATOR": "1",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload,
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
