"""Where each rank runs: its host, its device, and which other GPUs that reaches."""

import os
import socket
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from iris import simulator
from iris.errors import NoGpuForRankError, NoPeerAccessError, SeveralHostsError, SharedDeviceError, names
from iris.world.peers import host_id

# torch's own switch; the same one must do for Iris, or the two would contradict each other.
OVERLAP_VARIABLE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


class Seat(NamedTuple):
    """Where a rank runs: what tells two hosts, or two GPUs, apart."""

    host: str
    host_name: str
    gpu: str | None
    gpu_name: str | None


def on_gpu() -> bool:
    return not simulator.ACTIVE and torch.cuda.is_available()


def choose_device() -> torch.device:
    """This process's device: the GPU that the default process group is bound to, else the current one, else the CPU."""
    if not on_gpu():
        return torch.device("cpu")
    world = dist.group.WORLD
    bound = world.bound_device_id if world is not None else None
    if bound is not None and bound.type == "cuda":
        return bound
    return torch.device("cuda", torch.cuda.current_device())


def take_seat() -> Seat:
    """Go to this process's device. Raises what torch raises where that is out of order, and as `find_seat`."""
    device = choose_device()
    if device.type == "cuda":
        # Where kernels are compiled and launched, also if only the process group was told.
        torch.cuda.set_device(device)
    return find_seat(device)


def find_seat(device: torch.device) -> Seat:
    """Where this process runs. Raises `NoGpuForRankError` where kernels could not."""
    if device.type == "cpu" and not simulator.ACTIVE:
        raise NoGpuForRankError(
            f"torch finds no GPU here, and {simulator.VARIABLE}=0 forbids the simulator. Unset that to run kernels on "
            "the CPU; `python -m iris info` says what is missing for a GPU."
        )
    host, host_name = host_id(), socket.gethostname()
    if device.type == "cpu":
        return Seat(host, host_name, None, None)
    properties = torch.cuda.get_device_properties(device)
    return Seat(host, host_name, str(properties.uuid), properties.name)


def check_one_host(seats: Sequence[Seat]) -> None:
    """Raise `SeveralHostsError` unless all ranks are on one host."""
    if len({seat.host for seat in seats}) > 1:
        places = "; ".join(f"rank {rank} on {seat.host_name}" for rank, seat in enumerate(seats))
        raise SeveralHostsError(
            f"Iris needs all ranks on one host, and they are on several: {places}. "
            "Start one program per host, with a process group of its own."
        )


def check_own_gpus(seats: Sequence[Seat]) -> None:
    """Raise `SharedDeviceError` if two ranks use one GPU and torch was not told that they may."""
    if os.environ.get(OVERLAP_VARIABLE) == "1":
        return
    first: dict[str, int] = {}
    for rank, seat in enumerate(seats):
        if seat.gpu is not None and first.setdefault(seat.gpu, rank) != rank:
            raise SharedDeviceError(
                f"Ranks {first[seat.gpu]} and {rank} use the same GPU ({seat.gpu_name}, {seat.gpu}). Call "
                "torch.cuda.set_device(LOCAL_RANK) before iris.iris(), and start no more ranks than there are GPUs "
                f"(or set {OVERLAP_VARIABLE}=1 to share one on purpose)."
            )


def check_peer_access(seats: Sequence[Seat], rank: int, device: torch.device) -> None:
    """Raise `NoPeerAccessError` if the GPU of ``rank`` cannot reach a peer's that this process can see."""
    if device.type == "cpu":
        return
    visible = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    unreachable = [
        peer
        for peer, seat in enumerate(seats)
        if seat.gpu in visible
        and seat.gpu != seats[rank].gpu
        and not torch.cuda.can_device_access_peer(device.index, visible[seat.gpu])
    ]
    if unreachable:
        raise NoPeerAccessError(
            f"{device} ({seats[rank].gpu_name}) of rank {rank} cannot access the memory of the GPU of "
            f"{names(unreachable)}. `nvidia-smi topo -m` or `rocm-smi --showtopo` shows the links; "
            "choose GPUs that are connected, or run in the simulator with IRIS_SIMULATOR=1."
        )
