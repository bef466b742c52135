"""A benchmark's results with what is needed to read them later: command, date, versions, device."""

import csv
import datetime
import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import torch
import triton

from iris import simulator
from iris.ccl.select import name_of_ranks
from iris.commands.files import written
from iris.heap.history import shown

# They change what is measured: the generated code, which ranks share a host (this rank's, of which each host has its
# own), and who carries collectives over hosts.
SETTINGS = (
    *("IRIS_WAIT_TIMEOUT_S", "IRIS_DEBUG", "IRIS_TRACE", "IRIS_SANITIZE"),
    *("IRIS_HOST", "IRIS_OVER_HOSTS", "IRIS_NETWORK_GBPS"),
)
# How their names begin that choose NCCL's (and RCCL's) network and algorithms.
OF_THE_VENDOR = "NCCL_", "RCCL_"


def command() -> str:
    """What was typed: the settings, torchrun if there are several ranks, and a module by its name, wherever it lies.

    Of torchrun, on how many nodes, if there are several, and with how many ranks on each; not how they find each other.
    """
    program = Path(sys.argv[0])
    what = ["-m", program.parent.name] if program.name == "__main__.py" else [shown(str(program))]
    names = [*SETTINGS, *sorted(name for name in os.environ if name.startswith(OF_THE_VENDOR))]
    settings = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
    return shlex.join([*settings, *launcher(), *what, *sys.argv[1:]])


def launcher() -> list[str]:
    """How the ranks were started, or would be: of those that a command starts itself, by torchrun on one node."""
    ranks = os.environ.get("WORLD_SIZE")
    if not ranks:
        return ["python"]
    # torchrun's words; others that start ranks have none for nodes.
    nodes, each = os.environ.get("GROUP_WORLD_SIZE", "1"), os.environ.get("LOCAL_WORLD_SIZE", ranks)
    if nodes == "1":
        return ["torchrun", "--nproc-per-node", ranks]
    return ["torchrun", "--nnodes", nodes, "--nproc-per-node", each]


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


def numbers(num_ranks: int, num_hosts: int = 1) -> dict[str, int]:
    """Of ranks and hosts, as results have them."""
    return {"num_ranks": num_ranks, "num_hosts": num_hosts, "ranks_per_host": num_ranks // num_hosts}


def file_name(name: str, dtype: str, ranks: int | str) -> str:
    """Of what is written, without its ending: bf16, which most of it is, is left out. ``ranks``: `name_of_ranks`."""
    return f"{name}_{ranks}" if dtype == "bfloat16" else f"{name}_{dtype}_{ranks}"


def save(path: Path, num_ranks: int, figures: dict[str, float], num_hosts: int = 1) -> None:
    """Write ``figures`` (name with unit → value) as JSON; called by one rank."""
    result = {**environment(), **numbers(num_ranks, num_hosts), "figures": figures}
    with written(path):
        path.write_text(json.dumps(result, indent=2) + "\n")


def save_rows(table: Path, num_ranks: int, num_hosts: int, rows: Sequence[Any], **more: Any) -> None:
    """Write ``rows``, NamedTuples of one kind, as CSV, and beside it as JSON with what they depend on, and ``more``."""
    with written(table), open(table, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(rows[0]._fields)
        writer.writerows(rows)
    result = {**environment(), **numbers(num_ranks, num_hosts), **more, "rows": [row._asdict() for row in rows]}
    with written(table):
        table.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")


def below_floor(
    floors: Path, benchmark: str, num_ranks: int, figures: dict[str, float], num_hosts: int = 1
) -> list[str]:
    """The figures of ``benchmark`` that miss their bound in ``floors``, in words.

    The file maps device → benchmark → ranks → figure → bound, and ranks are "4" on one host, "2x8" over two with 8 on
    each; a figure that ends in ``_us`` may not be above its bound, any other not below it. A bound for a figure that
    was not measured is missed too. Where the file has none for this device and these ranks, the first rank says so.
    """
    device, ranks = environment()["device"], name_of_ranks(num_ranks // num_hosts, num_hosts)
    bounds = json.loads(floors.read_text()).get(device, {}).get(benchmark, {}).get(ranks, {})
    if not bounds and os.environ.get("RANK", "0") == "0":
        click.echo(f"{floors} has no floors of {benchmark} for {ranks} ranks on {device}: none was compared.", err=True)
    missed = []
    for name, bound in bounds.items():
        value = figures.get(name)
        if value is None:
            missed.append(f"{name} was not measured (bound {bound:g})")
        elif value > bound if name.endswith("_us") else value < bound:
            missed.append(f"{name} is {value:.4g}, and its bound is {bound:g}")
    return missed
