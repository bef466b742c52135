"""Compares the clock of each GPU of a host with that of the first rank, by signals to and fro, as NTP does.

The first rank reads its clock (t0), signals, and reads it again when the answer has come (t3). The other rank reads its
clock when the signal has come (t1), and when it answers (t2). If both directions take equally long, the other's clock
is ahead by ((t1 - t0) + (t2 - t3)) / 2. However long they take, that is wrong by no more than half of the time on the
link, ((t3 - t0) - (t2 - t1)) / 2 (Mills, "Internet Time Synchronization: the Network Time Protocol", 1991). Of `ROUNDS`
rounds the one with the least time on the link is taken. Clocks also run at slightly different speeds (drift). So they
are compared when recording begins and when it ends, and times in between are corrected in proportion.

In the simulator all ranks of a host read the host's clock, and nothing is compared.
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from iris.language.clock import clock
from iris.language.context import DeviceContext
from iris.language.ordering import signal, wait
from iris.runtime.workspace import Workspace

ROUNDS = 200


@triton.jit
def exchange_times(context_tensor, flags, peer, first, times, ROUNDS: tl.constexpr, LEADS: tl.constexpr):
    """``times``: int64 ``[ROUNDS, 2]``, t0 and t3 of each round if this rank `LEADS`, else t1 and t2.

    ``flags``: int32 ``[num_ranks]``; ``flags[r]`` is set by rank r alone, to the number of the round. Waits are for
    that number or a later one, and rounds are numbered on from ``first`` for the life of the workspace. Over the link:
    one flag in each direction for each round.
    """
    ctx = DeviceContext.initialize(context_tensor)
    theirs = ctx.translate(flags + ctx.cur_rank, peer)
    record = ctx._record()
    for number in range(ROUNDS):
        if LEADS:
            sent = clock()
            signal(theirs, first + number + 1, "set")
            wait(flags + peer, first + number + 1, "reached", record)
            tl.store(times + 2 * number + 1, clock())
            tl.store(times + 2 * number, sent)
        else:
            wait(flags + peer, first + number + 1, "reached", record)
            got = clock()
            answered = clock()
            signal(theirs, first + number + 1, "set")
            tl.store(times + 2 * number, got)
            tl.store(times + 2 * number + 1, answered)


@dataclass(frozen=True)
class Comparison:
    """When a rank's clock showed ``local_ns``, it was ahead of the first rank's by ``ahead_ns`` ± ``error_ns``."""

    local_ns: int
    ahead_ns: int
    error_ns: int


class Clock:
    """Compares the clocks of a group's ranks. Construction is collective."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace, self._rounds = workspace, 0
        size = 4 * workspace.group.size
        channel = workspace.channel("the comparison of clocks", None, size, slice(size))
        self._flags, self._context_tensor = channel.memory.view(torch.int32), channel.context_tensor

    def compare(self) -> Comparison:
        """This rank's clock against the first rank's. Collective; blocks the host; nothing else may be running."""
        group, device = self._workspace.group, self._workspace.device
        if device.type == "cpu" or group.size == 1:
            return Comparison(0, 0, 0)
        times = torch.zeros(group.size, ROUNDS, 2, dtype=torch.int64, device=device)
        for other in range(1, group.size):
            torch.cuda.synchronize(device)
            group.all_gather(None, f"the comparison of the clocks of rank 0 and {other}")
            if group.rank in (0, other):
                peer = other if group.rank == 0 else 0
                exchange_times[(1,)](
                    self._context_tensor,
                    self._flags,
                    peer,
                    self._rounds,
                    times[other],
                    ROUNDS,
                    LEADS=group.rank == 0,
                    num_warps=1,
                )
        self._rounds += ROUNDS
        mine = times.cpu().numpy()
        leaders = group.all_gather(mine.tolist() if group.rank == 0 else None, "the times of the first rank")[0]
        return (
            Comparison(int(mine[0, 0, 0]), 0, 0)
            if group.rank == 0
            else ahead(np.array(leaders[group.rank]), mine[group.rank])
        )


def ahead(leader: np.ndarray, follower: np.ndarray) -> Comparison:
    """By how much the follower's clock is ahead. Both are in ns, int64 ``[rounds, 2]``, as `exchange_times` writes."""
    under_way = (leader[:, 1] - leader[:, 0]) - (follower[:, 1] - follower[:, 0])
    best = int(under_way.argmin())
    (sent, back), (got, answered) = leader[best].tolist(), follower[best].tolist()
    return Comparison(answered, ((got - sent) + (answered - back)) // 2, -(-int(under_way[best]) // 2))


def common(local_ns: np.ndarray, before: Comparison, after: Comparison) -> np.ndarray:
    """Convert times of this rank's clock, int64 ns, to the first rank's."""
    between = after.local_ns - before.local_ns
    if between <= 0:
        return local_ns - before.ahead_ns
    drift = (after.ahead_ns - before.ahead_ns) / between
    return local_ns - before.ahead_ns - np.rint((local_ns - before.local_ns) * drift).astype(np.int64)


def error_between(local_ns: np.ndarray, before: Comparison, after: Comparison) -> float:
    """By how much `common` may be wrong for these times, in ns, if the drift is constant.

    It grows for times before the first comparison or after the second.
    """
    worst, between = float(max(before.error_ns, after.error_ns)), after.local_ns - before.local_ns
    if between <= 0 or not len(local_ns):
        return worst
    share = (np.array([local_ns.min(), local_ns.max()]) - before.local_ns) / between
    return max(worst, *(abs(1 - share) * before.error_ns + abs(share) * after.error_ns).tolist())
