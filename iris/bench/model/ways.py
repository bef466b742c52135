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
from iris.inductor import compile_options

FLOOR = "none"


class Way(NamedTuple):
    """``communication``: made by all ranks together. ``compiled``: what compiles layers' methods, if anything does."""

    communication: Callable[[Iris], Communication]
    compiled: Callable[[Callable], Callable] | None = None


def _by_the_vendor(ctx: Iris) -> Communication:
    world = dist.group.WORLD
    assert world is not None
    return ByTorch(world)


def _by_the_backend(ctx: Iris) -> Communication:
    group = dist.new_group(backend="cuda:iris")
    assert isinstance(group, dist.ProcessGroup)  # which has all ranks
    return ByTorch(group)


def compiled(method: Callable) -> Callable:
    """By Inductor on GPUs. In the simulator, where it would take longer than all else, by no more than AOTAutograd."""
    backend = "aot_eager" if simulator.ACTIVE else "inductor"
    return functools.wraps(method)(torch.compile(method, fullgraph=True, dynamic=False, backend=backend))


def accelerated(method: Callable) -> Callable:
    """As `compiled`, with Iris' operators put into the graphs of Inductor."""
    return functools.wraps(method)(torch.compile(method, fullgraph=True, dynamic=False, options=compile_options()))


# The vendor's library is NCCL or RCCL on GPUs, Gloo in the simulator.
WAYS = {
    "nccl": Way(_by_the_vendor),
    "nccl compiled": Way(_by_the_vendor, compiled=compiled),
    "iris accelerate": Way(_by_the_vendor, compiled=accelerated),
    "iris backend": Way(_by_the_backend),
    "iris fused": Way(Fused),
    "iris fused compiled": Way(FusedOperators, compiled=compiled),
    FLOOR: Way(lambda ctx: Alone(ctx.num_ranks)),
}
