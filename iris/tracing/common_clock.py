"""Converts the times of all recordings to one clock, that of the first rank, by the comparisons of several contexts.

A context compares the clocks of its ranks with that of its first rank, its *reference* (`iris.tracing.clock`,
`iris.tracing.host_clocks`). A program may have several contexts with different ranks, and so different references. A
rank reads the same clock in all of its contexts, so what one context has found of it holds for the others. So clocks
are the nodes of a graph, and comparisons its edges. From the clock of each recording the shortest path to the clock of
the first rank is taken. If there is none, the two clocks have not been compared, and times stay on that of the
reference.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from iris.tracing.clock import Comparison, common, error_between
from iris.tracing.rank_recording import Recording


@dataclass(frozen=True)
class ClockPath:
    """A path from one clock to another.

    ``steps``: for each edge the comparisons when recording began and when it ended, and whether they are between hosts.
    ``apart``: None if the path leads to the first rank's clock, else the clock that it leads to.
    """

    steps: tuple[tuple[Comparison, Comparison, bool], ...] = ()
    apart: Hashable = None

    def convert(self, local_ns: np.ndarray) -> np.ndarray:
        """Times of the clock at its begin, int64 ns, on the clock at its end."""
        for before, after, _ in self.steps:
            local_ns = common(local_ns, before, after)
        return local_ns

    def errors(self, local_ns: np.ndarray) -> tuple[float, float]:
        """By how much the result of `convert` may be wrong, in ns: from steps within hosts, and from those between."""
        within = between = 0.0
        for before, after, of_hosts in self.steps:
            error = error_between(local_ns, before, after)
            within, between = (within, between + error) if of_hosts else (within + error, between)
            local_ns = common(local_ns, before, after)
        return within, between


def reference(recordings: Sequence[Recording]) -> int:
    """The rank to whose clock all times are converted."""
    return min((recording.ranks[0] for recording in recordings), default=0)


def clock_paths(recordings: Sequence[Recording]) -> list[ClockPath]:
    """For each recording, the path to the clock of the `reference`."""
    hosts = {recording.rank: recording.host.key for recording in recordings}

    def clock(rank: int, recording: Recording) -> Hashable:
        """What identifies the clock of a rank: each GPU has one, and the simulated ranks of a host share one."""
        if recording.device != "cpu":
            return rank
        return hosts.get(rank, rank) if recording.host.compared else recording.host.key

    # The edges: each recording has one, from the clock of its rank to that of its context's first rank.
    own = [_steps(recording) for recording in recordings]
    begins = [clock(recording.rank, recording) for recording in recordings]
    ends = [clock(recording.ranks[0], recording) for recording in recordings]
    first = reference(recordings)
    # The steps from each clock that a path has been found for, beginning with the first rank's own.
    known: dict[Hashable, tuple] = {
        end: () for end, recording in zip(ends, recordings, strict=True) if recording.ranks[0] == first
    }
    leads_to = defaultdict(list)
    for begin, end, steps in zip(begins, ends, own, strict=True):
        leads_to[end].append((begin, steps))
    reached = list(known)
    for end in reached:  # Breadth first. The list grows meanwhile.
        for begin, steps in leads_to[end]:
            if begin not in known:
                known[begin] = steps + known[end]
                reached.append(begin)
    found = []
    for begin, end, steps in zip(begins, ends, own, strict=True):
        # By the recording's own edge first, or by those of other recordings of the same rank: the shorter path is
        # taken.
        through = [steps + known[end]] if end in known else []
        through += [known[begin]] if begin in known else []
        found.append(ClockPath(min(through, key=len)) if through else ClockPath(steps, apart=end))
    return found


def _steps(recording: Recording) -> tuple[tuple[Comparison, Comparison, bool], ...]:
    """From the clock of the recording's rank to that of its host's first rank, and on to that of the first host's."""
    steps = [(recording.before, recording.after, False)]
    if recording.host.compared:
        steps.append((*recording.host.compared, True))
    return tuple(steps)
