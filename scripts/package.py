"""Builds the sdist and the wheel into `dist/`, and tries them as users get them: in a new environment, an empty folder.

Neither has the checkout on its path. There the wheel is installed, the programs of the quick starts run under torchrun,
the commands run, and a sample of the tests does. Then the sdist takes the wheel's place, built by pip, with the same
files. `make package` and CI run this; nothing is published.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "docs/quick-start.md")
# Of the tests, those that need nothing of the checkout but the folder `tests`, and show that each part is there.
SAMPLE = ("test_acceptance.py", "test_tensors.py", "heap/test_allocator.py", "ccl/test_reduction.py")


def quick_starts(root: Path = ROOT) -> dict[str, str]:
    """The programs with names on the pages that show how to begin: a block that imports begins one, others go on."""
    programs: list[str] = []
    for page in PAGES:
        for block in re.findall(r"^```python\n(.*?)^```$", (root / page).read_text(), flags=re.M | re.S):
            if isinstance(ast.parse(block).body[0], ast.Import | ast.ImportFrom):
                programs.append(block)
            else:
                programs[-1] += block
    names = [re.match(r"# (\w+\.py)\n", program) for program in programs]
    return {name[1]: program for name, program in zip(names, programs, strict=True) if name}


def build(folder: Path) -> tuple[Path, Path]:
    """The sdist of the checkout, and the wheel of the sdist."""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "build", "--outdir", folder, ROOT], check=True)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def check_contents(sdist: Path, wheel: Path) -> None:
    """Both have every file of the package, and nothing that is none."""
    listed = subprocess.run(["git", "ls-files", "iris", "iris_backend.py"], cwd=ROOT, capture_output=True, text=True)
    wanted = set(listed.stdout.split())
    with zipfile.ZipFile(wheel) as file:
        packed = {name for name in file.namelist() if ".dist-info/" not in name}
    with tarfile.open(sdist) as archive:
        source = {name.partition("/")[2] for name in archive.getnames()}
    if packed != wanted or not wanted <= source:
        raise SystemExit(f"The package differs: {sorted(packed ^ wanted)}; missing in the sdist: {wanted - source}")


class Environment:
    """A new one, with torch as `make setup` installs it. What runs there runs in an empty folder."""

    def __init__(self, folder: Path) -> None:
        from setup import has_gpu, newest_cpu_build

        venv.create(folder / "env", with_pip=True)
        self._bin, self.folder = folder / "env" / "bin", folder / "empty"
        self.folder.mkdir()
        pip = [str(self._bin / "python"), "-m", "pip", "--disable-pip-version-check"]
        build = None if has_gpu() else newest_cpu_build(pip)
        if build:
            self.run("pip", "install", "--quiet", f"torch=={build}")

    def run(self, command: str, *arguments: object) -> str:
        """What it prints. Ends this program if it fails."""
        shown = " ".join(map(str, (command, *arguments)))
        print(f"$ {shown}", flush=True)
        hidden = ("PYTHONPATH", "VIRTUAL_ENV")
        environment = {name: value for name, value in os.environ.items() if name not in hidden and "IRIS" not in name}
        environment["PATH"] = f"{self._bin}{os.pathsep}{environment['PATH']}"
        words = [str(self._bin / command), *map(str, arguments)]
        done = subprocess.run(words, cwd=self.folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{done.stdout}{done.stderr}\n{shown}: exit status {done.returncode}")
        return done.stdout


def main() -> None:
    sdist, wheel = build(ROOT / "dist")
    check_contents(sdist, wheel)
    with tempfile.TemporaryDirectory(prefix="iris-package-") as folder:
        environment = Environment(Path(folder))
        environment.run("pip", "install", "--quiet", f"{wheel}[test]")
        where = environment.run("python", "-c", "import iris; print(iris.__file__)").strip()
        if not where.startswith(folder):
            raise SystemExit(f"Not what was installed: {where}")
        for name, program in quick_starts().items():
            (environment.folder / name).write_text(program)
            environment.run("torchrun", "--standalone", "--nproc-per-node", 2, name)
        for command in ("--help", "info", "demo", "check quick_start.py", "trace quick_start.py", "bench ccl --help"):
            environment.run("iris", *command.split())
        shutil.copytree(ROOT / "tests", environment.folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        # Without pyproject.toml, which the checkout has: pytest gets its settings here.
        settings = "[pytest]\npythonpath = tests\nmarkers =\n    ranks(*counts): run with these numbers of ranks\n"
        (environment.folder / "pytest.ini").write_text(settings)
        environment.run("python", "-m", "pytest", "-q", *(f"tests/{each}" for each in SAMPLE))
        environment.run("pip", "uninstall", "--quiet", "--yes", "iris-rma")
        environment.run("pip", "install", "--quiet", sdist)
        environment.run("python", "quick_start.py")
    print(f"{sdist.name} and {wheel.name} are whole, and work where there is no checkout.")


if __name__ == "__main__":
    main()
