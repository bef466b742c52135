"""Where a rank runs: its host, its device, and which other GPUs that device can access."""

import os
import socket
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from iris import mode
from iris.errors import NoGpuForRankError, NoPeerAccessError, SharedDeviceError, names
from iris.world.peers import host_id

# The switch of torch's symmetric memory. Iris has none of its own, which could contradict it.
OVERLAP_VARIABLE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"

# Names the host of a rank, in the place of the machine's boot id. Tests make two "hosts" of one machine with it.
HOST_VARIABLE = "IRIS_HOST"


class Placement(NamedTuple):
    """Where a rank runs.

    Ranks with the same ``host`` reach each other's memory; messages call it ``host_name``. ``gpu`` is the UUID of the
    GPU and ``gpu_name`` its model; both are None in the simulator.
    """

    host: str
    host_name: str
    gpu: str | None
    gpu_name: str | None


def on_gpu() -> bool:
    """Whether kernels of this process run on a GPU, and not in the simulator."""
    return not mode.ACTIVE and torch.cuda.is_available()


def choose_device() -> torch.device:
    """This process's device: the GPU that the default process group is bound to, else the current one, else the CPU."""
    if not on_gpu():
        return torch.device("cpu")
    world = dist.group.WORLD
    bound = world.bound_device_id if world is not None else None
    if bound is not None and bound.type == "cuda":
        return bound
    return torch.device("cuda", torch.cuda.current_device())


def bind_to_device() -> Placement:
    """Make this process's device the current one. Raises as `find_placement`, or as torch does for a broken GPU."""
    device = choose_device()
    if device.type == "cuda":
        # Kernels are compiled for the current device, and launched there. It may not be the one that init_process_group
        # was given as device_id.
        torch.cuda.set_device(device)
    return find_placement(device)


def find_placement(device: torch.device) -> Placement:
    """Where this process runs. Raises `NoGpuForRankError` where kernels could not."""
    if device.type == "cpu" and not mode.ACTIVE:
        raise NoGpuForRankError(
            f"torch finds no GPU here, and {mode.VARIABLE}=0 forbids the simulator. Unset that to run kernels on "
            "the CPU; `python -m iris info` says what is missing for a GPU."
        )
    host, host_name = find_host()
    if device.type == "cpu":
        return Placement(host, host_name, None, None)
    properties = torch.cuda.get_device_properties(device)
    return Placement(host, host_name, str(properties.uuid), properties.name)


def find_host() -> tuple[str, str]:
    """This process's host: a text that no other host has, and the name that messages use."""
    given = os.environ.get(HOST_VARIABLE)
    return (given, given) if given else (host_id(), socket.gethostname())


def check_own_gpus(placements: Sequence[Placement], ranks: Sequence[int]) -> None:
    """Raise `SharedDeviceError` if two ranks use one GPU and torch does not allow it.

    ``ranks``: the global rank of each placement.
    """
    if os.environ.get(OVERLAP_VARIABLE) == "1":
        return
    first: dict[str, int] = {}
    for rank, placement in zip(ranks, placements, strict=True):
        if placement.gpu is not None and first.setdefault(placement.gpu, rank) != rank:
            raise SharedDeviceError(
                f"Ranks {first[placement.gpu]} and {rank} use the same GPU ({placement.gpu_name}, {placement.gpu}). "
                "Call torch.cuda.set_device(LOCAL_RANK) before iris.iris(), and start no more ranks than there are "
                f"GPUs (or set {OVERLAP_VARIABLE}=1 to share one on purpose)."
            )


def gpus_out_of_reach(device: torch.device) -> list[str]:
    """The UUIDs of the GPUs that this process sees and whose memory ``device`` cannot access."""
    if device.type == "cpu":
        return []
    others = [number for number in range(torch.cuda.device_count()) if number != device.index]
    return [
        str(torch.cuda.get_device_properties(number).uuid)
        for number in others
        if not torch.cuda.can_device_access_peer(device.index, number)
    ]


def check_peer_access(placements: Sequence[Placement], ranks: Sequence[int], rank: int, device: torch.device) -> None:
    """Raise `NoPeerAccessError` if ``device`` of this rank cannot access the GPU of a peer on its host.

    ``ranks``: the global rank of each placement. ``rank``: the index of this rank's.

    GPUs that this process does not see (CUDA_VISIBLE_DEVICES) are not checked.
    """
    out_of_reach = gpus_out_of_reach(device)
    unreachable = [
        peer
        for peer, placement in zip(ranks, placements, strict=True)
        if placement.host == placements[rank].host and placement.gpu in out_of_reach
    ]
    if unreachable:
        raise NoPeerAccessError(
            f"{device} ({placements[rank].gpu_name}) of rank {ranks[rank]} cannot access the memory of the GPU of "
            f"{names(unreachable)}. `nvidia-smi topo -m` or `rocm-smi --showtopo` shows the links; "
            "choose GPUs that are connected, or run in the simulator with IRIS_SIMULATOR=1."
        )
