"""``python -m iris info``: versions, devices, the links between them, how kernels would run, and what is missing."""

import json
import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from iris import requirements
from iris.compat.links import nvlinks
from iris.errors import TritonMissingError, names, readable
from iris.version import __version__

if TYPE_CHECKING:
    from iris.context import Iris

# What chooses the network of NCCL, and of Gloo.
NETWORK_VARIABLES = ("NCCL_NET", "NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")

# The oldest Triton that is tested.
OLDEST_TRITON = (3, 6)

NVIDIA_DEVICE, AMD_DEVICE = Path("/dev/nvidiactl"), Path("/dev/kfd")


def collect() -> dict[str, Any]:
    """Everything that `show` prints, in types that JSON has. Makes a small heap to see whether that works."""
    devices = find_devices()
    report = {
        "versions": find_versions(),
        "devices": devices,
        "links": [[link(i, j) for j in range(len(devices))] for i in range(len(devices))],
        "simulator": explain_simulator(),
        "host": find_own_host(),
        "mapping": try_heap(),
    }
    report["missing"] = find_missing(report)
    return report


def find_versions() -> dict[str, str | None]:
    return {
        "iris": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _installed("triton"),
        "numpy": _installed("numpy"),
        "CUDA of torch": torch.version.cuda,
        "ROCm of torch": torch.version.hip,
        "GPU driver": find_driver(),
        "platform": platform.platform(),
    }


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def find_driver() -> str | None:
    """The version of the kernel's driver for NVIDIA or AMD GPUs, if one is loaded."""
    for file in (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version")):
        if file.exists():
            found = re.search(r"\d+\.\d+[.\d]*", file.read_text())
            return found and found.group()
    return None


def find_devices() -> list[dict[str, Any]]:
    devices = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        architecture = getattr(properties, "gcnArchName", None) if torch.version.hip else None
        devices.append(
            {
                "index": index,
                "name": properties.name,
                "architecture": architecture or f"sm_{properties.major}{properties.minor}",
                "multiprocessors": properties.multi_processor_count,
                "memory": properties.total_memory,
            }
        )
    return devices


def link(i: int, j: int) -> str:
    """How GPU ``i`` reaches GPU ``j``: "NV18" (so many NVLinks), "peer" (some other way, such as PCIe), or "none"."""
    if i == j:
        return ""
    if not torch.cuda.can_device_access_peer(i, j):
        return "none"
    count = 0 if torch.version.hip else nvlinks(i, j)
    return f"NV{count}" if count else "peer"


def explain_simulator() -> dict[str, Any]:
    """Whether kernels run in the simulator here, and why."""
    try:
        requirements.check()
    except TritonMissingError:
        return {"active": None, "reason": "there is no Triton"}
    from iris import simulator

    if choice := os.environ.get(simulator.VARIABLE):
        reason = f"{simulator.VARIABLE}={choice} is set"
    elif torch.cuda.is_available():
        reason = "TRITON_INTERPRET=1 is set" if simulator.ACTIVE else "there is a GPU"
    else:
        reason = "torch finds no GPU"
    return {"active": simulator.ACTIVE, "reason": reason}


def find_own_host() -> dict[str, str] | None:
    """On which host this process's rank would be, and by what that is known; None without Triton."""
    try:
        requirements.check()
    except TritonMissingError:
        return None
    from iris.world.placement import HOST_VARIABLE, find_host

    _, name = find_host()
    return {"name": name, "by": HOST_VARIABLE if os.environ.get(HOST_VARIABLE) else "the boot id"}


def try_heap() -> dict[str, Any]:
    """Which kind of memory the ranks would share, and whether a heap of one rank works."""
    try:
        requirements.check()
    except TritonMissingError as error:
        return {"kind": None, "works": False, "error": str(error)}
    from iris.context import Iris
    from iris.world import choose_device

    device = choose_device()
    kind = "anonymous shared memory (memfd)" if device.type == "cpu" else "torch.distributed._symmetric_memory"
    try:
        with Iris(1 << 20) as ctx:
            written = ctx.arange(1000)
            works = bool((ctx.peer(written, ctx.get_rank()).cpu() == torch.arange(1000)).all())
            wrong = None if works else "what was written is not read back"
            return {"kind": kind, "works": works, "error": wrong} | find_hosts(ctx)
    except Exception as error:
        return {"kind": kind, "works": False, "error": f"{type(error).__name__}: {error}"}


def find_hosts(ctx: "Iris") -> dict[str, Any]:
    """Where a context has several hosts: which, and what data travel by from one to another."""
    if ctx._rail is None:
        return {}
    hosts = ctx._world.hosts
    given = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name in NETWORK_VARIABLES]
    return {
        "hosts": [{"name": name, "ranks": ranks} for name, ranks in zip(hosts.names, hosts.ranks, strict=True)],
        "linked by": ", ".join([ctx._rail.name, *given]),
    }


def find_missing(report: dict[str, Any]) -> list[dict[str, str]]:
    """What stands in the way, each with its remedy. The last ones only matter for GPUs."""
    missing = []

    def say(what: str, remedy: str) -> None:
        missing.append({"what": what, "remedy": remedy})

    if platform.system() != "Linux":
        say(f"{platform.system()} is not supported", "Use Linux: WSL 2 on Windows, a container on macOS.")
    triton = report["versions"]["triton"]
    if report["simulator"]["active"] is None:
        say("Triton cannot be imported", report["mapping"]["error"])
    elif triton and tuple(map(int, triton.split(".")[:2])) < OLDEST_TRITON:
        say(f"Triton {triton} is too old", "pip install 'triton>=3.6'")
    if not report["mapping"]["works"] and report["simulator"]["active"] is not None:
        say("a heap of one rank does not work", report["mapping"]["error"])
    if not report["devices"]:
        present = NVIDIA_DEVICE.exists() or AMD_DEVICE.exists()
        if present and not (torch.version.cuda or torch.version.hip):
            say("this torch cannot use the GPU of this machine", "Install a build of torch for CUDA or ROCm.")
        elif present:
            remedy = "Update the driver, or let this user open the device (/dev/nvidia*, /dev/kfd, /dev/dri/*)."
            say("torch finds no GPU, although a driver is loaded", remedy)
        else:
            remedy = "None is needed: kernels run in the simulator. To use one, install its driver and torch for it."
            say("no GPU", remedy)
    elif len(report["devices"]) == 1:
        say("only one GPU", "Two ranks need two; with IRIS_SIMULATOR=1 they run in the simulator.")
    pairs = [(i, j) for i, row in enumerate(report["links"]) for j, each in enumerate(row) if each == "none"]
    if pairs:
        remedy = "Choose GPUs that are linked (CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES), or IRIS_SIMULATOR=1."
        say(f"no peer access between GPUs {', '.join(f'{i} and {j}' for i, j in pairs if i < j)}", remedy)
    return missing


def print_json(report: dict[str, Any]) -> None:
    print(json.dumps(report, indent=2))


def show(report: dict[str, Any]) -> None:
    """Print a report for people."""
    console = Console(highlight=False)

    def title(text: str) -> None:
        console.print(f"\n[bold]{text}[/]")

    title("Versions")
    for name, number in report["versions"].items():
        console.print(f"  {name:14} {number or '[dim]none[/]'}")

    title("Devices")
    for device in report["devices"]:
        console.print(
            f"  {device['index']}: {device['name']}, {device['architecture']}, {device['multiprocessors']} "
            f"multiprocessors, {readable(device['memory'])}"
        )
    if not report["devices"]:
        console.print("  no GPU")
    if len(report["devices"]) > 1:
        title("Links (NVn: n NVLinks, peer: another way, none: no access)")
        table = Table("", *(str(device["index"]) for device in report["devices"]), box=None)
        for index, row in enumerate(report["links"]):
            table.add_row(str(index), *row)
        console.print(table)

    simulator, mapping = report["simulator"], report["mapping"]
    title("How kernels run here")
    runs = {True: "in the simulator, on the CPU", False: "compiled, on GPUs", None: "not at all"}
    console.print(f"  {runs[simulator['active']]}, because {simulator['reason']}")
    if mapping["kind"]:
        verdict = "[green]a heap of one rank works ✓[/]" if mapping["works"] else "[red]does not work ✗[/]"
        console.print(f"  heaps: {mapping['kind']}; {verdict}")
    if host := report["host"]:
        console.print(f"  this host: {host['name']}, by {host['by']}")
    if "hosts" in mapping:
        title("Hosts")
        for number, each in enumerate(mapping["hosts"]):
            console.print(f"  {number}: {each['name']}, {names(each['ranks'])}")
        console.print(f"  linked by {mapping['linked by']}")

    title("Missing")
    for each in report["missing"]:
        console.print(f"  [yellow]{each['what']}[/]")
        console.print(Padding(Text(each["remedy"]), (0, 0, 0, 4)))
    if not report["missing"]:
        console.print("  [green]nothing[/]")
