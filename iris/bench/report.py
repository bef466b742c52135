"""A benchmark's results with what is needed to read them later: command, date, versions, device."""

import datetime
import json
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
import triton

from iris import simulator
from iris.commands.files import written
from iris.heap.history import shown

# They change the generated code, and so the figures.
SETTINGS = "IRIS_WAIT_TIMEOUT_S", "IRIS_DEBUG", "IRIS_TRACE", "IRIS_SANITIZE"


def command() -> str:
    """What was typed: `SETTINGS`, torchrun if there are several ranks, and a module by its name, wherever it lies."""
    program = Path(sys.argv[0])
    what = ["-m", program.parent.name] if program.name == "__main__.py" else [shown(str(program))]
    ranks = os.environ.get("WORLD_SIZE")
    settings = [f"{name}={os.environ[name]}" for name in SETTINGS if name in os.environ]
    launcher = ["torchrun", "--nproc-per-node", ranks] if ranks else ["python"]
    return shlex.join([*settings, *launcher, *what, *sys.argv[1:]])


def environment() -> dict[str, Any]:
    """What the figures of this run depend on."""
    on_gpu = not simulator.ACTIVE and torch.cuda.is_available()
    return {
        "command": command(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if on_gpu else f"simulator on {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def save(path: Path, num_ranks: int, figures: dict[str, float]) -> None:
    """Write ``figures`` (name with unit → value) as JSON; called by one rank."""
    with written(path):
        path.write_text(json.dumps({**environment(), "num_ranks": num_ranks, "figures": figures}, indent=2) + "\n")


def below_floor(floors: Path, benchmark: str, num_ranks: int, figures: dict[str, float]) -> list[str]:
    """The figures of ``benchmark`` that miss their bound in ``floors``, in words.

    The file maps device → benchmark → number of ranks → figure → bound; a figure that ends in ``_us`` may not be above
    its bound, any other not below it. A bound for a figure that was not measured is missed too.
    """
    of_device = json.loads(floors.read_text()).get(environment()["device"], {})
    bounds = of_device.get(benchmark, {}).get(str(num_ranks), {})
    missed = []
    for name, bound in bounds.items():
        value = figures.get(name)
        if value is None:
            missed.append(f"{name} was not measured (bound {bound:g})")
        elif value > bound if name.endswith("_us") else value < bound:
            missed.append(f"{name} is {value:.4g}, and its bound is {bound:g}")
    return missed
