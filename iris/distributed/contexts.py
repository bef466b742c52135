"""The Iris context of any process group, whatever its backend: operators of compiled graphs name such a group.

torch.compile has to know whether a group can have a context before its ranks meet to make it: each rank compiles its
graphs at another time, or takes them from a cache. So each process writes once where it runs into the store of torch's
default group. All ranks decide from what is there, and so decide alike.
"""

from collections import Counter
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist

from iris import simulator
from iris.ccl.functional import make_contexts_with
from iris.ccl.queue import MAX_RANKS
from iris.compat.c10d import default_store, existing_groups, group_named
from iris.context import Iris
from iris.distributed.group import ProcessGroupBase
from iris.errors import IrisTimeoutError
from iris.world import choose_device, wire
from iris.world.placement import find_host, gpus_out_of_reach
from iris.world.store import await_keys, put, shared_client

DEFAULT_DEVICE = torch.device("cpu" if simulator.ACTIVE else "cuda")
# Seconds that `known_reasons`, which the compile cache asks, waits once for other ranks to say where they run.
PATIENCE_S = 5.0

# Those of other backends' groups. They live until torch destroys the group: graphs may have captured their memory.
_contexts: dict[dist.ProcessGroup, Iris] = {}


def context_of(group: dist.ProcessGroup, device: torch.device | None = None) -> Iris:
    """The context of ``group``, with an empty heap, on ``device`` or, without one, on the current device.

    The first call for a group is collective over it and blocks the host. In the capture of a CUDA graph it raises
    `FirstUseInCaptureError`.
    """
    if isinstance(group, ProcessGroupBase):
        return group.context(device or DEFAULT_DEVICE, "an operator")
    _forget_destroyed_groups()
    if group not in _contexts:
        _contexts[group] = Iris(0, process_group=group)
    return _contexts[group]


class Place(NamedTuple):
    """Where a process runs: its host, and the UUIDs of its GPU and of the GPUs that this one cannot access."""

    host: str
    gpu: str | None
    out_of_reach: list[str]


# The places that are known, by global rank, for each store of a default group. A program may initialise torch again.
_places: WeakKeyDictionary[dist.Store, dict[int, Place]] = WeakKeyDictionary()
# The stores at which `known_reasons` has waited.
_waited: WeakSet[dist.Store] = WeakSet()


def say_place() -> None:
    """Let other ranks know where this process runs, once, if torch.distributed is initialised. Local."""
    if not dist.is_initialized() or _is_fake(dist.group.WORLD) or default_store() in _places:
        return
    device, (host, _) = choose_device(), find_host()
    gpu = None if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)
    place = Place(host, gpu, gpus_out_of_reach(device))
    put(_store(), str(dist.get_rank()), wire.encode(place))
    _places[default_store()] = {dist.get_rank(): place}


def why_no_context(name: str) -> str | None:
    """Why the process group with this name can have no context; None if it can. The same on all ranks.

    Waits until all of its ranks have said where they run, as each does when it compiles a graph or calls
    `iris.accelerate`. Raises `IrisTimeoutError` if one does not within the time limit of the default group.
    """
    group = group_named(name)
    if group in _contexts or isinstance(group, ProcessGroupBase) and group.has_context:
        return None
    lacking = _wait_for_places(group)
    if lacking:
        raise IrisTimeoutError(
            f"Of the process group {name!r} nobody knows where the ranks {lacking} run, as they compile nothing for "
            "Iris. Call iris.accelerate() on all ranks."
        )
    return _why(group)


def known_reasons() -> dict[str, str] | None:
    """This rank's groups that can have no context, by name, and why (`why_no_context`).

    None if some rank has not said yet where it runs.
    """
    if not dist.is_initialized():
        return {}
    groups = list(existing_groups())
    seconds = 0 if default_store() in _waited else PATIENCE_S
    _waited.add(default_store())
    if any(_wait_for_places(group, seconds) for group in groups):
        return None
    reasons = {group.group_name: _why(group) for group in groups}
    return {name: why for name, why in reasons.items() if why is not None}


def _why(group: dist.ProcessGroup) -> str | None:
    """`why_no_context` of a group of which all places are known."""
    if _is_fake(group) or _is_fake(dist.group.WORLD):
        return "there are no other ranks, as the backend is fake"
    places = [_places[default_store()][rank] for rank in dist.get_process_group_ranks(group)]
    on_hosts = Counter(place.host for place in places)
    if len(set(on_hosts.values())) > 1:
        return "its hosts have different numbers of the group's ranks"
    if max(on_hosts.values()) > MAX_RANKS:
        return f"a host has more than {MAX_RANKS} of the group's ranks"
    gpus = {(place.host, place.gpu) for place in places}
    if any((place.host, gpu) in gpus for place in places for gpu in place.out_of_reach):
        return "there are GPUs in the group that cannot access each other's memory"
    return None


def _wait_for_places(group: dist.ProcessGroup, seconds: float | None = None) -> list[int]:
    """Wait until the group's ranks have said where they run. Returns those that have not, by global rank.

    ``seconds``: how long to wait at most; None: the time limit of the store.
    """
    if _is_fake(group) or _is_fake(dist.group.WORLD):
        return []
    say_place()
    known = _places[default_store()]
    lacking = [rank for rank in dist.get_process_group_ranks(group) if rank not in known]
    if not lacking:
        return []
    store = _store()
    if seconds is None:
        seconds = store.timeout.total_seconds()  # type: ignore[attr-defined]
    keys = [str(rank) for rank in lacking]
    if not await_keys(store, keys, seconds, lambda waited: None):
        return [rank for rank, key in zip(lacking, keys, strict=True) if not store.check([key])]
    for rank, place in zip(lacking, store.multi_get(keys), strict=True):
        known[rank] = Place(*wire.decode(place))
    return []


def _store() -> dist.Store:
    return dist.PrefixStore("iris/places", shared_client(default_store()))


def _is_fake(group: dist.ProcessGroup | None) -> bool:
    """Whether this is a group of torch's fake backend, which plays all ranks in one process and moves nothing."""
    return group is not None and dist.get_backend(group) == "fake"


def _forget_destroyed_groups() -> None:
    there = existing_groups()
    for group in [group for group in _contexts if group not in there]:
        context = _contexts.pop(group)
        if context.device.type == "cuda":
            torch.cuda.synchronize(context.device)
        context._release()


# An operator of a compiled graph names a group. The graph may come from Inductor's cache, in a process that has not
# compiled it. So the context is made when an operator first runs.
make_contexts_with(context_of)
