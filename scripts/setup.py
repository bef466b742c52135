"""Makes the virtual environment `.venv` that the Makefile's targets run in: this project with all its extras.

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


def main() -> None:
    folder = ROOT / ".venv"
    done = folder / "installed"
    wanted = (ROOT / "pyproject.toml").read_text()
    if done.exists() and done.read_text() == wanted:
        return
    if folder.is_symlink():
        # Its files are of another checkout, whose tests may be running.
        sys.exit(f".venv is a link to {folder.resolve()}, which is not made of this pyproject.toml. Remove the link.")
    print("Setting up .venv (once)", flush=True)
    venv.create(folder, with_pip=True, clear=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    torch = []
    if not has_gpu():
        build = newest_cpu_build(pip)
        torch = [f"torch=={build}"] if build else []
        print(f"No GPU here: torch {build}" if build else "No GPU here, and no CPU build of torch in sight", flush=True)
    # Python compiles what it imports: a part of torch alone.
    install = ["install", "--quiet", "--no-compile"]
    subprocess.run([*pip, *install, *torch, "-e", f"{ROOT}[test,docs,bench]"], check=True)
    done.write_text(wanted)


if __name__ == "__main__":
    main()
