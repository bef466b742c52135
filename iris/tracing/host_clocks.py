"""One clock for all hosts: how far the clock of each is from the first one's, found by exchanges along a rail.

The first local ranks of all hosts, a rail, exchange a byte again and again. Each reads its clock when it begins (a) and
when it has everybody's byte (b). Nobody has all before all have begun. With another rank's times as they are on its
clock, which is ahead by x, that says

    b' - x >= a   and   b >= a' - x,   so   a' - b <= x <= b' - a.

The middle is taken, and the error is half of the way between, ((b - a) + (b' - a')) / 2. These are the offset and the
bound of a message to and fro that is sent at a and received at b', and answered at a' and received at b (Cristian,
"Probabilistic clock synchronization", Distributed Computing 3, 1989; Mills, RFC 5905, section 8), in which the answer
may leave before the question comes. Of `ROUNDS` exchanges the one with the least error counts.

The byte goes by what the hosts exchange data with: NCCL between clocks of GPUs, Gloo between those of simulators.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from iris.language.clock import clock
from iris.tracing.clock import Comparison, ahead
from iris.world import Group, Hosts, Rail
from iris.world.rail import Transfer, timed_by

ROUNDS = 50

# A GPU waits for so long before the exchanges, in which the host enqueues them: else its pace would be part of each.
HOLD_NS = 30_000_000


@dataclass(frozen=True)
class HostClock:
    """The clock of a host, which is that of its first rank in a context.

    ``key``: what distinguishes the host from others; ``name``: what people call it; ``compared``: its clock with that
    of the first host of the context, when recording began and when it ended; None where the context has one host.
    """

    key: str
    name: str
    compared: tuple[Comparison, Comparison] | None = None


@triton.jit(do_not_specialize=["number"])
def read_clock(times, number):
    """``times``: int64; the time goes to ``times[number]``."""
    tl.store(times + number, clock())


@triton.jit
def hold(ns):
    """Let so many nanoseconds pass."""
    begin = clock()
    while clock() - begin < ns:
        pass


class _Exchanges:
    """A timer of a rail by Gloo: [when it began, when it had all], in ns, without what the host does around it."""

    def __init__(self) -> None:
        self.times: list[list[int]] = []

    def timed(self, transfer: Transfer, start: Callable[[], Any]) -> tuple[Callable[[], Any], Callable[[], None]]:
        pair = [0, 0]
        self.times.append(pair)

        def note(_: Any = None) -> None:
            pair[1] = pair[1] or time.monotonic_ns()

        def start_timed() -> Any:
            pair[0] = time.monotonic_ns()
            work = start()
            work.get_future().add_done_callback(note)
            return work

        return start_timed, note


def compare(group: Group, hosts: Hosts, rail: Rail, device: torch.device) -> Comparison:
    """The clock of this host's first rank against that of the first host's. Collective over all ranks; blocks the host.

    Nothing else may be running.
    """
    times = _exchange(group, rail, len(hosts), device) if hosts.local_rank == 0 else None
    everyone = group.all_gather(times, "the times at which the hosts exchanged a byte")
    first, this = (np.array(everyone[ranks[0]], dtype=np.int64) for ranks in (hosts.ranks[0], hosts.local_ranks))
    if hosts.number == 0:
        return Comparison(int(this[0, 0]), 0, 0)
    # The byte of the first rank was "received" at b', and that of this one "sent" at a'.
    return ahead(first, this[:, ::-1])


def _exchange(group: Group, rail: Rail, hosts: int, device: torch.device) -> list[list[int]]:
    """When this rank began, and when it had all bytes, of each exchange, in ns of its clock."""
    mine, all_of_them = (torch.zeros(n, dtype=torch.uint8, device=device) for n in (1, hosts))
    if device.type == "cpu":
        exchanges = _Exchanges()
        with timed_by(group, exchanges):
            for _ in range(ROUNDS):
                rail.all_gather(all_of_them, mine, "a comparison of clocks")()
        return exchanges.times
    times = torch.zeros(ROUNDS, 2, dtype=torch.int64, device=device)
    with timed_by(group, None):
        for number in range(ROUNDS):
            if number == 1:
                # All kernels have been loaded by now: this one with nothing to wait for.
                hold[(1,)](0, num_warps=1)
                hold[(1,)](HOLD_NS, num_warps=1)
            read_clock[(1,)](times, 2 * number, num_warps=1)
            rail.all_gather(all_of_them, mine, "a comparison of clocks")()
            read_clock[(1,)](times, 2 * number + 1, num_warps=1)
    return times.tolist()
