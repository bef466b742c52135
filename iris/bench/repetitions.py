"""How often a call is measured: over several hosts, whose network may be slow, by how long it takes."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from iris.context import Iris


class Repetitions(NamedTuple):
    """Calls in a graph, replays of it that are timed, and replays before these."""

    per_graph: int
    replays: int
    warmups: int

    def fewer(self, us: float) -> "Repetitions":
        """Of a call that takes so many microseconds: no more than `MOST_US` of all replays, but `LEAST_REPLAYS`."""
        per_graph = max(1, min(self.per_graph, int(GRAPH_US / us)))
        replays = max(LEAST_REPLAYS, min(self.replays, int(MOST_US / 2 / us / per_graph)))
        return Repetitions(per_graph, replays, max(1, min(self.warmups, int(MOST_US / 2 / us / per_graph))))


# A graph begins with a barrier of all ranks, some microseconds that its calls share.
PER_GRAPH = 20
# Of what moves so many bytes or more: replays that are timed, and replays before. And of less. Those before take some
# 10 ms, in which a GPU that was idle reaches its speed.
MANY_BYTES = 4 << 20
SELDOM, OFTEN = Repetitions(PER_GRAPH, 15, 15), Repetitions(PER_GRAPH, 25, 200)
# Over hosts: of a graph, and of all replays of one, microseconds at most. A barrier takes some 100.
GRAPH_US, MOST_US = 20_000.0, 1_000_000.0
LEAST_REPLAYS = 3


def repetitions(ctx: Iris, call: Callable[[], object], nbytes: int) -> Repetitions:
    """Of a call that moves so many bytes, which has been made before. Collective over the world: the same on all."""
    usual = SELDOM if nbytes >= MANY_BYTES else OFTEN
    if ctx.num_hosts == 1 or ctx.device.type != "cuda":
        return usual
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    ctx.device_barrier()
    start.record()
    call()
    end.record()
    end.synchronize()
    mine = 1e3 * start.elapsed_time(end)
    return usual.fewer(max(ctx.broadcast(mine, rank) for rank in range(ctx.num_ranks)))
