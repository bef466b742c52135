"""The ways of communicating that are measured beside each other, by name."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

import iris.distributed  # noqa: F401  # which registers the backend
from iris import simulator
from iris.bench.model.communication import Alone, ByTorch, Communication, Fused, FusedOperators
from iris.context import Iris

FLOOR = "none"


class Way(NamedTuple):
    """``communication``: made by all ranks together. ``compiled``: whether the layers go through torch.compile."""

    communication: Callable[[Iris], Communication]
    compiled: bool = False


def _by_the_vendor(ctx: Iris) -> Communication:
    world = dist.group.WORLD
    assert world is not None
    return ByTorch(world)


def _by_the_backend(ctx: Iris) -> Communication:
    group = dist.new_group(backend="cuda:iris")
    assert isinstance(group, dist.ProcessGroup)  # which has all ranks
    return ByTorch(group)


# The vendor's library is NCCL or RCCL on GPUs, Gloo in the simulator.
WAYS = {
    "nccl": Way(_by_the_vendor),
    "nccl compiled": Way(_by_the_vendor, compiled=True),
    "iris backend": Way(_by_the_backend),
    "iris fused": Way(Fused),
    "iris fused compiled": Way(FusedOperators, compiled=True),
    FLOOR: Way(lambda ctx: Alone(ctx.num_ranks)),
}


def compiled(method: Callable) -> Callable:
    """By Inductor on GPUs. In the simulator, where it would take longer than all else, by no more than AOTAutograd."""
    backend = "aot_eager" if simulator.ACTIVE else "inductor"
    return functools.wraps(method)(torch.compile(method, fullgraph=True, dynamic=False, backend=backend))
