"""The ways of communicating that are measured beside each other, by name."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

import iris.distributed  # noqa: F401  # which registers the backend
from iris import simulator
from iris.bench.model.all_to_all import ByAllToAll
from iris.bench.model.communication import Alone, ByTorch, Communication, Fused, FusedOperators
from iris.bench.model.decoder import Compiler
from iris.bench.model.dimensions import Dimensions
from iris.context import Iris
from iris.inductor import compile_options

FLOOR = "none"


class Way(NamedTuple):
    """``communication``: made by all ranks together. ``compiler``: what methods of layers go through, if anything.

    ``host_counts``: whether the host waits for the number of tokens of each expert, which no graph can capture.
    """

    communication: Callable[[Iris], Communication]
    compiler: Compiler | None = None
    host_counts: bool = False

    def suits(self, mode: str, dimensions: Dimensions) -> bool:
        """Whether there is anything to measure: only training steps run without a graph."""
        return not self.host_counts or (mode == "train" and dimensions.experts > 0)


def inductor(method: Callable) -> Callable:
    """torch.compile by its default; in the simulator, where that takes longer than all else, by AOTAutograd alone."""
    backend = "aot_eager" if simulator.ACTIVE else "inductor"
    return torch.compile(method, fullgraph=True, dynamic=False, backend=backend)


def accelerated(method: Callable) -> Callable:
    """By Inductor, in whose graphs Iris' operators take the place of torch's, as `iris.accelerate` has it for all."""
    return torch.compile(method, fullgraph=True, dynamic=False, options=compile_options())


def _by_the_vendor(ctx: Iris) -> Communication:
    world = dist.group.WORLD
    assert world is not None
    return ByTorch(world)


def _by_all_to_all(ctx: Iris) -> Communication:
    world = dist.group.WORLD
    assert world is not None
    return ByAllToAll(world)


def _by_the_backend(ctx: Iris) -> Communication:
    group = dist.new_group(backend="cuda:iris")
    assert isinstance(group, dist.ProcessGroup)  # which has all ranks
    return ByTorch(group)


# The vendor's library is NCCL or RCCL on GPUs, Gloo in the simulator.
WAYS = {
    "nccl": Way(_by_the_vendor),
    "nccl compiled": Way(_by_the_vendor, compiler=inductor),
    "nccl all-to-all": Way(_by_all_to_all, host_counts=True),
    "iris accelerate": Way(_by_the_vendor, compiler=accelerated),
    "iris backend": Way(_by_the_backend),
    "iris fused": Way(Fused),
    "iris fused compiled": Way(FusedOperators, compiler=inductor),
    FLOOR: Way(lambda ctx: Alone(ctx.num_ranks)),
}
# Inductor takes minutes for what the simulator does in seconds.
BY_DEFAULT = [way for way in WAYS if not (simulator.ACTIVE and WAYS[way].compiler is accelerated)]
