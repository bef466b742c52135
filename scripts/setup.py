"""Makes the virtual environment `.venv` (or the one named as first argument) that the Makefile's targets run in.

    python3 scripts/setup.py [VENV] [REQUIREMENT...]

The environment gets this project with its test, docs and bench extras, and the REQUIREMENTs, such as ``triton==3.6.0``.
A machine without a GPU gets a CPU build of torch if pip can find one, because the ordinary build brings gigabytes
of CUDA libraries that would never run.
"""

import re
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_TORCH = (2, 9)


def has_gpu() -> bool:
    return any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))


def newest_cpu_build(pip: list[str]) -> str | None:
    """The newest version of torch marked "+cpu" among those that pip sees, if it is new enough."""
    listing = subprocess.run([*pip, "index", "versions", "torch"], capture_output=True, text=True).stdout
    builds = [tuple(map(int, version.split("."))) for version in re.findall(r"\b(\d+\.\d+\.\d+)\+cpu\b", listing)]
    newest = max(builds, default=(0,))
    return ".".join(map(str, newest)) + "+cpu" if newest >= OLDEST_TORCH else None


def main(folder: str = ".venv", *requirements: str) -> None:
    done = ROOT / folder / "installed"
    wanted = (ROOT / "pyproject.toml").read_text() + repr(requirements)
    if done.exists() and done.read_text() == wanted:
        return
    print(f"Setting up {folder} (once)", flush=True)
    venv.create(ROOT / folder, with_pip=True, clear=True)
    pip = [str(ROOT / folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    torch = []
    if not has_gpu():
        build = newest_cpu_build(pip)
        torch = [f"torch=={build}"] if build else []
        print(
            f"No GPU here: taking torch {build}" if build else "No GPU here, and no CPU build of torch in sight",
            flush=True,
        )
    subprocess.run([*pip, "install", "--quiet", *torch, *requirements, "-e", f"{ROOT}[test,docs,bench]"], check=True)
    done.write_text(wanted)


if __name__ == "__main__":
    main(*sys.argv[1:])
