"""What is installed from the wheel is whole: it has all files of the package, and runs where there is no checkout."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from conftest import UNDER_TORCHRUN
from preloaded import LIMIT_S

import iris
from iris.ccl import select
from iris.errors import InvalidTableError

ROOT = Path(__file__).parents[1]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]

pytestmark = pytest.mark.skipif(UNDER_TORCHRUN, reason="needs no ranks; run it without torchrun")


def packaged():
    """The files of the package that stand in the checkout, but for what Python compiles."""
    files = [path for path in (ROOT / "iris").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {str(path.relative_to(ROOT)) for path in files} | {"iris_backend.py"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    # A copy, since setuptools builds in the source's folder, where files that are gone by now would come along.
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in [*packaged(), "pyproject.toml", "README.md", "LICENSE"]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    build = [*PIP, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source]
    subprocess.run(build, check=True, timeout=LIMIT_S)
    (file,) = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([*PIP, "install", "--quiet", "--no-deps", "--target", folder, wheel], check=True, timeout=LIMIT_S)
    return folder


def run(installed, where, *command):
    """In an empty folder, with what was installed in front of all else that Python finds."""
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    return subprocess.run(
        command, cwd=where, env=environment, capture_output=True, text=True, check=True, timeout=LIMIT_S
    ).stdout


def test_the_wheel_has_the_package_and_nothing_else(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == packaged()
    assert wheel.name.startswith(f"iris_rma-{iris.__version__}-")


def test_what_is_installed_is_what_runs(installed, tmp_path):
    where = run(installed, tmp_path, sys.executable, "-c", "import iris; print(iris.__file__)")
    assert Path(where.strip()).parents[1] == installed


def test_the_console_script_runs(installed, tmp_path):
    assert "Commands:" in run(installed, tmp_path, installed / "bin" / "iris", "--help")


def test_ranks_reach_each_other(installed, tmp_path):
    shutil.copytree(ROOT / "tests" / "acceptance", tmp_path / "programs")
    program = tmp_path / "programs" / "quick_start_triton.py"
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    result = subprocess.run(
        [sys.executable, program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.count(": ok") == 2


def test_a_table_that_was_not_installed_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(select, "SHIPPED", tmp_path / "tables.json")
    with pytest.raises(InvalidTableError, match="tables.json is missing: Iris is not installed whole"):
        select.load_table("any GPU", 2)
