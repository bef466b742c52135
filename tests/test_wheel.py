"""What is installed from the wheel is whole: it has all files of the package, and runs where there is no checkout.

The wheel is built from the sdist. `scripts/package.py` does the same with a new environment, and runs tests there.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from conftest import UNDER_TORCHRUN
from covering import EVERYTHING
from preloaded import LIMIT_S, python

import iris
from scripts.package import quick_starts

ROOT = Path(__file__).parents[1]
DOCUMENTS = ["README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]

pytestmark = pytest.mark.skipif(UNDER_TORCHRUN, reason="needs no ranks; run it without torchrun")


def packaged():
    """The files of the package that stand in the checkout, but for what Python compiles."""
    files = [path for path in (ROOT / "iris").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {str(path.relative_to(ROOT)) for path in files} | {"iris_backend.py"}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    # A copy, since setuptools builds in the source's folder, where files that are gone by now would come along.
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("sdist")
    for name in [*packaged(), *DOCUMENTS, "pyproject.toml", "MANIFEST.in", "tests/test_wheel.py"]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    program = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    build = [sys.executable, "-c", program]
    subprocess.run(build, cwd=source, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True, timeout=LIMIT_S)
    (file,) = folder.glob("*.tar.gz")
    return file


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    build = [*PIP, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, sdist]
    subprocess.run(build, check=True, timeout=LIMIT_S)
    (file,) = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([*PIP, "install", "--quiet", "--no-deps", "--target", folder, wheel], check=True, timeout=LIMIT_S)
    return folder


def run(installed, where, *command):
    """In an empty folder, with what was installed first on the path of Python."""
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    return subprocess.run(
        command, cwd=where, env=environment, capture_output=True, text=True, check=True, timeout=LIMIT_S
    ).stdout


def test_the_sdist_has_the_package_and_its_documents(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {*packaged(), *DOCUMENTS, "pyproject.toml"} <= names
    assert not any(name.startswith("tests") for name in names)


def test_the_wheel_has_the_package_and_nothing_else(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == packaged()
    assert wheel.name.startswith(f"iris_rma-{iris.__version__}-")
    assert {"iris/py.typed", "iris/machine/collectives.json", "iris/machine/operations.json"} <= names


def test_what_is_installed_is_what_runs(installed, tmp_path):
    where = run(installed, tmp_path, *python(), "-c", "import iris; print(iris.__file__)")
    assert Path(where.strip()).parents[1] == installed


@pytest.mark.parametrize("words", ["--help", "info", "demo"] if EVERYTHING else ["--help"])
def test_the_console_script_runs(installed, tmp_path, words):
    assert run(installed, tmp_path, installed / "bin" / "iris", words)


STARTS = quick_starts()


def test_the_pages_have_the_quick_starts():
    assert list(STARTS) == ["quick_start.py", "quick_start_gluon.py", "quick_start_collectives.py", "tour.py"]


@pytest.mark.parametrize("name", STARTS if EVERYTHING else ["quick_start_collectives.py"])
def test_the_quick_starts_run(installed, tmp_path, name):
    (tmp_path / name).write_text(STARTS[name])
    run(installed, tmp_path, *python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", name)
