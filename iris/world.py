"""Who takes part: ranks, the device of each, and how their hosts talk.

Rank and size come from ``torch.distributed``. A process that torchrun started and that has not initialised it yet is
initialised here; a process that nobody started is a world of one rank, without any process group.

Hosts talk through the *store* of the process group, the small key-value server that every process group has anyway.
Nothing here touches a GPU, so ranks can meet while their kernels wait for each other.
"""

import atexit
import contextlib
import functools
import os
import pickle
import socket
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.util import Finalize
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from iris import simulator
from iris.errors import (
    InvalidGroupError,
    IrisTimeoutError,
    NoGpuForRankError,
    NoPeerAccessError,
    OutOfStepError,
    PeerFailedError,
    PeerLostError,
    SeveralHostsError,
    SharedDeviceError,
)
from iris.simulator import sanitizer

T = TypeVar("T")

# torch's own switch; the same one must do for Iris, or the two would contradict each other.
OVERLAP_VARIABLE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"

# How long a process that ends waits for peers that are still reading what it sent: they need milliseconds.
LEAVE_LIMIT_S = 5.0
# What a process that has ended meets for.
ENDED = "the end of the program"


def names(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0 and 3``, ``ranks 0, 1 and 3``."""
    *most, last = [str(rank) for rank in ranks]
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def check_process_group(group: object) -> None:
    """Raise `InvalidGroupError` unless ``group`` is one that this rank is in."""
    if not isinstance(group, dist.ProcessGroup):
        raise InvalidGroupError(
            "This rank is not a member of the group: torch.distributed.new_group() gave it a placeholder. "
            "Only members make this call."
            if group is dist.GroupMember.NON_GROUP_MEMBER
            else f"group={group!r} is not a process group: make one with torch.distributed.new_group()."
        )


class Group:
    """Ranks that meet on the host.

    Parameters
    ----------
    process_group
        The torch process group whose members meet; None for a group of this process alone.

    Attributes
    ----------
    rank, size : int
        This process within the group, and the number of members.
    ranks : tuple of int
        The members' ranks in the world, by rank in the group.
    timeout : float
        Seconds after which a meeting fails: the time limit that ``torch.distributed`` was initialised with.
    name : str
        Another one for every group of the process, and the same on all its members.
    store : torch.distributed.Store
        The members' own, on every host.
    meetings : int
        How many there have been, the same number on all members.

    Notes
    -----
    Members must create their groups over one process group in the same order: the n-th is the n-th everywhere, and that
    is what keeps two of them apart.
    """

    # Counted for the life of the process, because a store may outlive the process group (torchrun's agent holds one).
    _made: Counter[str] = Counter()
    # The group that met last, by process group. Whoever comes to a meeting has left all earlier ones.
    _latest: "dict[str, Group]" = {}
    # All of the process: peers may be waiting in any of them when it ends.
    _all: "weakref.WeakSet[Group]" = weakref.WeakSet()

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self.process_group = process_group
        self.meetings = 0
        if process_group is None:
            self.rank, self.size, self.ranks = 0, 1, (0,)
            self.name = f"alone/{Group._made['alone']}"
            Group._made["alone"] += 1
            self.timeout = distributed_c10d.default_pg_timeout.total_seconds()
            return
        check_process_group(process_group)
        self.rank, self.size = process_group.rank(), process_group.size()
        self.ranks = tuple(dist.get_process_group_ranks(process_group))
        store = distributed_c10d._get_process_group_store(process_group)
        number = Group._made[process_group.group_name]
        Group._made[process_group.group_name] += 1
        self.name = f"{process_group.group_name}/iris/{number}"
        self.store = dist.PrefixStore(f"iris/{number}", store)
        self.store.set(f"-1/{self.rank}", "")
        Group._all.add(self)
        _part_from_peers(os.getpid())
        self.timeout = store.timeout.total_seconds()

    def all_gather(self, value: Any, what: str, orders: bool = True) -> list[Any]:
        """Every member's ``value``, by rank in the group. Collective; blocks the host; no GPU takes part.

        Parameters
        ----------
        value
            Anything that can be pickled. What may fail on some members, as a user's value, is for `agree`.
        what
            What the members meet for, the same words on all of them: it completes "while waiting for …" in the errors.
        orders
            Whether a program may rely on it: not on a meeting that only debug mode adds.

        Raises
        ------
        IrisTimeoutError
            Members did not come within the time limit; the message names them.
        OutOfStepError
            Members met for different things, on every member.
        PeerLostError
            The store is gone, or a member's program has ended.
        """
        if self.size == 1:
            return [value]
        # Before the meeting counts: a value that cannot be pickled must not put this member out of step.
        text = pickle.dumps((what, value))
        recorder = sanitizer.recorder if orders else None
        key = (self.name, self.meetings)
        with recorder.meeting(key, self.ranks, what) if recorder is not None else contextlib.nullcontext():
            return self._exchange(value, what, text)

    def _exchange(self, value: Any, what: str, text: bytes) -> list[Any]:
        """`all_gather` of what is pickled as ``text``."""
        this, last = self.meetings, self.meetings - 1
        self.meetings += 1
        peers = self._peers()
        keys = [f"{this}/{rank}" for rank in peers]
        try:
            self.store.set(f"{this}/{self.rank}", text)
            if self.store.has_extended_api():
                texts = self.store.multi_get(keys)
            else:
                texts = [self.store.get(key) for key in keys]
            # Whoever has come to this meeting has left the last one, so nobody will read this any more. That it is gone
            # also tells the others that this meeting's values have been read.
            self.store.delete_key(f"{last}/{self.rank}")
            Group._latest[self.process_group.group_name] = self
        except dist.DistStoreError as error:
            raise self._timed_out(this, what) from error
        except dist.DistNetworkError as error:
            raise self._lost(what) from error
        met = dict(zip(peers, map(pickle.loads, texts), strict=True))
        met[self.rank] = (what, value)
        ended = [self.ranks[rank] for rank, (other, _) in sorted(met.items()) if other == ENDED]
        if ended:
            raise PeerLostError(
                f"Rank {self.ranks[self.rank]} waits in {what}, and {names(ended)} will not come: the program has "
                "ended there. Is every rank of the group making this call?"
            )
        if any(other != what for other, _ in met.values()):
            if sanitizer.recorder is not None:
                sanitizer.recorder.out_of_step(what)
            points = "; ".join(f"rank {self.ranks[rank]} in {met[rank][0]}" for rank in range(self.size))
            raise OutOfStepError(
                f"The ranks are at different points of the program: {points}. "
                "Collective calls must be made by all ranks of the group, in the same order."
            )
        return [met[rank][1] for rank in range(self.size)]

    def agree(self, step: Callable[[], T], what: str) -> list[T]:
        """Do a step that may fail on some members: it worked on all of them, or it raises on all of them.

        Collective; blocks the host. Whoever calls undoes what its own step did when this raises.

        Parameters
        ----------
        step
            Called once on each member. That what it returns can be pickled is part of the step.
        what
            Completes "could not …", the same words on all members.

        Returns
        -------
        list
            What ``step`` returned on every member, by rank in the group.

        Raises
        ------
        Exception
            On a member whose step raised: what it raised.
        PeerFailedError
            On the others, with the text of the error.
        """
        if self.size == 1:
            return [step()]
        result, failure = None, None
        try:
            result = pickle.dumps(step())
        except Exception as error:
            failure = error
        text = failure and f"{type(failure).__name__}: {failure}"
        outcomes = self.all_gather((result, text), f"a meeting to {what}")
        if failure is not None:
            raise failure
        failed = [(self.ranks[rank], text) for rank, (_, text) in enumerate(outcomes) if text is not None]
        if failed:
            raise PeerFailedError("; ".join(f"rank {rank} could not {what}: {text}" for rank, text in failed))
        return [pickle.loads(result) for result, _ in outcomes]

    def _peers(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _say_goodbye(self) -> None:
        """Come to the next meeting for the last time: whoever waits there waits no longer."""
        self.store.set(f"{self.meetings}/{self.rank}", pickle.dumps((ENDED, None)))

    def _leave(self, deadline: float) -> None:
        """Wait until every peer has read the last meeting's values, or ``deadline``."""
        keys = [f"{self.meetings - 2}/{rank}" for rank in self._peers()]
        while any(self.store.check([key]) for key in keys) and time.monotonic() < deadline:
            time.sleep(1e-3)

    def _timed_out(self, this: int, what: str) -> Exception:
        try:
            missing = [self.ranks[rank] for rank in range(self.size) if not self.store.check([f"{this}/{rank}"])]
        except dist.DistNetworkError:
            return self._lost(what)
        verb = "has" if len(missing) == 1 else "have"
        return IrisTimeoutError(
            f"Rank {self.ranks[self.rank]} waited {self.timeout:g} s in {what}, "
            + (f"and {names(missing)} {verb} not come. " if missing else "which took that long. ")
            + "Is every rank of the group making this call? The limit is the time-out of the process group."
        )

    def _lost(self, what: str) -> Exception:
        return PeerLostError(
            f"Rank {self.ranks[self.rank]} lost its connection to the other ranks in {what}. "
            "The process that holds the store has most likely ended; look for an error in its output."
        )


def _leave_groups(stays: bool) -> None:
    # If the program has failed, its launcher tells the cause and ends the other ranks. That this one does not come must
    # not be told in its place.
    if sys.exc_info()[0] is None and not hasattr(sys, "last_value"):
        for group in Group._all:
            with contextlib.suppress(dist.DistError):
                group._say_goodbye()
    deadline = time.monotonic() + LEAVE_LIMIT_S
    for group in Group._latest.values() if stays else ():
        with contextlib.suppress(dist.DistError):
            group._leave(deadline)


@functools.cache
def _part_from_peers(process: int) -> None:
    """When the process of this number ends, it tells its peers, and rank 0 waits for them to leave their last meetings.

    The store lives with rank 0 (if not with torchrun's agent), and must not end under peers that read it. The others
    need nothing of each other.

    Not by atexit, which processes that multiprocessing forks do not run; and such a process forgets what its parent has
    registered.
    """
    Finalize(None, _leave_groups, args=(dist.get_rank() == 0,), exitpriority=10)


@dataclass(frozen=True)
class World:
    """All ranks, and this rank's device.

    Attributes
    ----------
    group : Group
        Every rank of the program, or of the process group that it was joined for.
    device : torch.device
        Where this rank's heap lives: its GPU, or the CPU.
    """

    group: Group
    device: torch.device

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size


@dataclass(frozen=True)
class Seat:
    """Where a rank runs: what tells two hosts, or two GPUs, apart."""

    host: str
    host_name: str
    gpu: str | None
    gpu_name: str | None


def join(process_group: dist.ProcessGroup | None = None) -> World:
    """Find the world of this process: all ranks, or those of ``process_group``. Collective; blocks the host.

    Raises
    ------
    NoGpuForRankError
        Without a GPU and with ``IRIS_SIMULATOR=0``; `PeerFailedError` on ranks that have one.
    SeveralHostsError, SharedDeviceError
        On every rank, when ranks are on several hosts or two of them use one GPU.
    NoPeerAccessError
        When a rank's GPU cannot reach another's; `PeerFailedError` on ranks whose GPU can reach all.
    """
    if not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _initialise()
    group = Group(process_group or (dist.group.WORLD if dist.is_initialized() else None))
    if simulator.ACTIVE:
        simulator.hang.rank = lambda: group.ranks[group.rank]
        sanitizer.start_if_wanted(group)
    seats = group.agree(take_seat, "find out where it runs")
    device = choose_device()
    check_one_host(seats)
    check_own_gpus(seats)
    group.agree(lambda: check_peer_access(seats, group.rank, device), "reach the GPUs of its peers")
    return World(group, device)


def _initialise() -> None:
    if _on_gpu():
        # A process may see only its own GPU (CUDA_VISIBLE_DEVICES set per rank), hence the remainder. Where that makes
        # two ranks share a GPU, `check_own_gpus` says so.
        local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    dist.init_process_group("nccl" if _on_gpu() else "gloo")
    ours = dist.group.WORLD

    def destroy() -> None:
        if dist.is_initialized() and dist.group.WORLD is ours:
            dist.destroy_process_group()

    atexit.register(destroy)


def _on_gpu() -> bool:
    return not simulator.ACTIVE and torch.cuda.is_available()


def choose_device() -> torch.device:
    """This process's device: the GPU that the default process group is bound to, else the current one, else the CPU."""
    if not _on_gpu():
        return torch.device("cpu")
    bound = dist.group.WORLD.bound_device_id if dist.is_initialized() else None
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
    host_name = socket.gethostname()
    try:
        # Containers of one host have host names of their own, and one boot id.
        with open("/proc/sys/kernel/random/boot_id") as file:
            host = file.read().strip()
    except OSError:
        host = host_name
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
