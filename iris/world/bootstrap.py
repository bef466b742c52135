"""Finds the world of this process: its ranks, hosts and device, and the connections to other hosts.

Rank and size come from ``torch.distributed``. In a process that torchrun has started, `join` initialises it if the
program has not. A process without a launcher is a world of one rank, without any process group.
"""

import atexit
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from iris import mode, observer
from iris.cuda_graphs.capture import a_graph_lives
from iris.errors import MismatchedSettingsError
from iris.world import remote_peers
from iris.world.gloo_rail import GlooRail
from iris.world.group import Group
from iris.world.hosts import Hosts, divide, divide_members
from iris.world.links import Links
from iris.world.nccl_rail import NcclRail
from iris.world.placement import (
    Placement,
    bind_to_device,
    check_own_gpus,
    check_peer_access,
    choose_device,
    on_gpu,
)
from iris.world.rail import Rail, Route, rail_of
from iris.world.store import own_client

# Seconds for which the end of a program waits for its process groups to be destroyed.
DESTROY_LIMIT_S = 5.0


@dataclass(frozen=True)
class World:
    """All ranks, and this rank's device.

    Attributes
    ----------
    group : Group
        All ranks of the program, or of the process group that `join` was given.
    device : torch.device
        Where this rank's heap lives: its GPU, or the CPU.
    hosts : Hosts
        Which ranks are on which host.
    rail : Rail or None
        Exchanges data with the ranks of the same local rank on other hosts; None where there is one host.
    links : Links or None
        Sends messages to single ranks of other hosts; None where there is one host.
    """

    group: Group
    device: torch.device
    hosts: Hosts
    rail: Rail | None
    links: Links | None = None

    def disconnect(self) -> None:
        """Close the connections to other hosts. Local. The caller guarantees that no call is under way."""
        for each in (self.links, self.rail):
            if each:
                each.close()

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size


def join(process_group: dist.ProcessGroup | None = None) -> World:
    """Find the world of this process: all ranks, or those of ``process_group``. Collective; blocks the host.

    Raises
    ------
    NoGpuForRankError
        Without a GPU and with ``IRIS_SIMULATOR=0``; `PeerFailedError` on ranks that have one.
    MismatchedSettingsError
        On every rank, when an environment variable is set on some that must be set on all or none.
    InvalidGroupError
        On every rank, when hosts have different numbers of ranks.
    SharedDeviceError
        On every rank, when two of them use one GPU.
    NoPeerAccessError
        When a rank's GPU cannot reach another's; `PeerFailedError` on ranks whose GPU can reach all.
    """
    if not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        initialise()
    group = Group(dist.group.WORLD if process_group is None and dist.is_initialized() else process_group)
    check_settings(group, group.all_gather(settings(), "the comparison of settings"))
    if mode.ACTIVE:
        observer.joined(group)
    placements = [Placement(*placement) for placement in group.agree(bind_to_device, "find out where it runs")]
    device = choose_device()
    hosts = divide(group, placements)
    check_own_gpus(placements, group.ranks)
    group.agree(lambda: check_peer_access(placements, group.ranks, group.rank, device), "reach the GPUs of its peers")
    if len(hosts) == 1:
        return World(group, device, hosts, None)
    watch_other_hosts(group, hosts)
    return World(group, device, hosts, *connect(group, hosts, device))


def narrow(world: World, members: Group) -> World:
    """The world of some ``members`` of ``world``. Collective over the members.

    If they are on several hosts it blocks the host, and they get a rail and links of their own. Raises
    `InvalidGroupError` on every member, if hosts have different numbers of them.
    """
    hosts = divide_members(members, world.group, world.hosts)
    return World(
        members, world.device, hosts, *(connect(members, hosts, world.device) if len(hosts) > 1 else (None, None))
    )


def watch_other_hosts(group: Group, hosts: Hosts) -> None:
    """Connect to the processes of other hosts, so that their end is noticed. Collective; blocks the host."""
    processes = group.members.processes
    # Two hosts of one machine (IRIS_HOST) see each other's processes. Either all ranks see all others, or no rank does,
    # so all take the same branch.
    if all(peer is None or peer.watched for peer in processes):
        return
    places = group.agree(lambda: remote_peers.listen(group.store), "listen for the ranks of other hosts")
    remote_peers.watch(
        [
            (peer, place and (place[0], place[1]), hosts.name_of(rank))
            for rank, (peer, place) in enumerate(zip(processes, places, strict=True))
            if peer is not None and not peer.watched
        ]
    )


def connect(group: Group, hosts: Hosts, device: torch.device) -> tuple[Rail, Links]:
    """This rank's rail, and its links. Collective over all hosts; blocks the host. It works on all ranks, or raises."""
    rails: list[Rail] = []

    def make(route: Route, store: dist.Store) -> Rail:
        if device.type == "cpu":
            return GlooRail(group, hosts, route, store)
        return NcclRail(group, hosts, route, store, device)

    try:
        group.agree(
            lambda: rails.append(make(rail_of(hosts), own_client(group.store))), "connect to the ranks of other hosts"
        )
    except BaseException:
        rails.clear()
        raise
    return rails[0], Links(group, make)


def settings() -> dict[str, str]:
    """The environment variables that decide in which meetings a rank takes part: ``"0"`` or ``"1"`` each."""
    asked = {variable: os.environ.get(variable) or "0" for variable in ("IRIS_DEBUG", "IRIS_SANITIZE", "IRIS_TRACE")}
    return asked | {mode.VARIABLE: str(int(mode.ACTIVE))}


def check_settings(group: Group, settings: Sequence[dict[str, str]]) -> None:
    """Raise `MismatchedSettingsError` unless the settings of all ranks are alike."""
    for variable in settings[0]:
        ranks: dict[str, list[int]] = {}
        for rank, each in zip(group.ranks, settings, strict=True):
            ranks.setdefault(each[variable], []).append(rank)
        if len(ranks) > 1:
            raise MismatchedSettingsError(variable, ranks)


def initialise() -> None:
    """Initialise torch.distributed as torchrun says, and destroy its groups when the program ends."""
    if on_gpu():
        # A process may see only its own GPU (CUDA_VISIBLE_DEVICES set per rank), hence the remainder. Where that makes
        # two ranks share a GPU, `check_own_gpus` says so.
        local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    dist.init_process_group("nccl" if on_gpu() else "gloo")
    ours = dist.group.WORLD

    def destroy() -> None:
        # NCCL would wait for CUDA graphs that have captured it. Where one lives, the groups end with the process.
        if dist.is_initialized() and dist.group.WORLD is ours and not a_graph_lives():
            _destroy_process_group()

    atexit.register(destroy)


def _destroy_process_group() -> None:
    """Destroy the process groups when the program ends, but do not wait for ever: a peer may have died."""
    rank = dist.get_rank()
    # A daemon, so that the interpreter does not wait for it either.
    thread = threading.Thread(target=dist.destroy_process_group, name="iris-destroy", daemon=True)
    thread.start()
    thread.join(DESTROY_LIMIT_S)
    if thread.is_alive():
        print(
            f"iris: rank {rank} ends without having destroyed its process groups: torch has been at it for "
            f"{DESTROY_LIMIT_S:g} s.",
            file=sys.stderr,
            flush=True,
        )
