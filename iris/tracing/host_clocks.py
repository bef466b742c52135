"""Compares the clock of each host with that of the first one, by exchanges along a rail.

The ranks with local rank 0 on all hosts, a rail, exchange a byte again and again. Each reads its clock when it begins
(a) and when it has everybody's byte (b). No rank has all bytes before all ranks have begun. Let another rank's times on
its own clock be a' and b', and let that clock be ahead by x. Then

    b' - x >= a   and   b >= a' - x,   so   a' - b <= x <= b' - a.

The middle of that interval is taken, and half of its length is the error: ((b - a) + (b' - a')) / 2. That is what NTP
computes for a message sent at a and received at b', and its answer sent at a' and received at b (Cristian,
"Probabilistic clock synchronization", Distributed Computing 3, 1989; Mills, RFC 5905, section 8). Here the "answer" may
leave before the message has come. Of `ROUNDS` exchanges the one with the least error is taken.

The byte goes the way of all data between hosts: by NCCL between clocks of GPUs, by Gloo between those of simulators.
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

# The GPU waits so long before the exchanges, while the host enqueues them all. Else the host's pace would be
# measured.
HOLD_NS = 30_000_000


@dataclass(frozen=True)
class HostClock:
    """The clock of a host, which is that of its first rank in a context.

    ``key``: a text that no other host has. ``name``: the host's name for people. ``compared``: its clock against that
    of the context's first host, when recording began and when it ended; None if the context has one host.
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
    """A timer for rails by Gloo: [begin, end] of each transfer, in ns, without what the host does around it."""

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
    # `ahead` takes when a follower received and when it answered: here b' and a', so the columns are swapped.
    return ahead(first, this[:, ::-1])


def _exchange(group: Group, rail: Rail, hosts: int, device: torch.device) -> list[list[int]]:
    """For each exchange when this rank began, and when it had all bytes, in ns of its clock."""
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
                # The first exchange has loaded all other kernels. `hold` is loaded by a launch that holds nothing.
                hold[(1,)](0, num_warps=1)
                hold[(1,)](HOLD_NS, num_warps=1)
            read_clock[(1,)](times, 2 * number, num_warps=1)
            rail.all_gather(all_of_them, mine, "a comparison of clocks")()
            read_clock[(1,)](times, 2 * number + 1, num_warps=1)
    return times.tolist()
