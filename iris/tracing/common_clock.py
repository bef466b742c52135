"""Times of all recordings on one clock, that of the first rank, along the comparisons that contexts have made.

A context compares the clocks of its ranks with that of its first rank, its *reference* (`iris.tracing.clock`,
`iris.tracing.host_clocks`). A program may have several, of some ranks each: their references differ. What one context
has found of a clock holds for recordings of the others, since a rank reads one clock in all of them. So from the clock
of each recording the shortest way leads along comparisons to the first rank's. Where there is none, nobody knows
how far the clocks are apart, and times stay on that of the reference.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from iris.tracing.clock import Comparison, common, error_between
from iris.tracing.rank_recording import Recording


@dataclass(frozen=True)
class Way:
    """From a clock to another one: comparisons when recording began and when it ended, and whether they are of hosts.

    ``apart``: None if it leads to the first rank's clock, else to whose it does.
    """

    steps: tuple[tuple[Comparison, Comparison, bool], ...] = ()
    apart: Hashable = None

    def follow(self, local_ns: np.ndarray) -> np.ndarray:
        """Times at its begin, int64 ns, at its end."""
        for before, after, _ in self.steps:
            local_ns = common(local_ns, before, after)
        return local_ns

    def errors(self, local_ns: np.ndarray) -> tuple[float, float]:
        """By how much it may be off, in ns: within hosts, and between these."""
        within = between = 0.0
        for before, after, of_hosts in self.steps:
            error = error_between(local_ns, before, after)
            within, between = (within, between + error) if of_hosts else (within + error, between)
            local_ns = common(local_ns, before, after)
        return within, between


def reference(recordings: Sequence[Recording]) -> int:
    """The rank on whose clock all times are to be."""
    return min((recording.ranks[0] for recording in recordings), default=0)


def ways(recordings: Sequence[Recording]) -> list[Way]:
    """For each recording, how its times get on the clock of the `reference` of all."""
    hosts = {recording.rank: recording.host.key for recording in recordings}

    def clock(rank: int, recording: Recording) -> Hashable:
        """Simulated ranks of a host read one clock, GPUs have one each."""
        if recording.device != "cpu":
            return rank
        return hosts.get(rank, rank) if recording.host.compared else recording.host.key

    own = [_steps(recording) for recording in recordings]
    begins = [clock(recording.rank, recording) for recording in recordings]
    ends = [clock(recording.ranks[0], recording) for recording in recordings]
    first = reference(recordings)
    known: dict[Hashable, tuple] = {
        end: () for end, recording in zip(ends, recordings, strict=True) if recording.ranks[0] == first
    }
    leads_to = defaultdict(list)
    for begin, end, steps in zip(begins, ends, own, strict=True):
        leads_to[end].append((begin, steps))
    reached = list(known)
    for end in reached:  # which grows: the nearest first
        for begin, steps in leads_to[end]:
            if begin not in known:
                known[begin] = steps + known[end]
                reached.append(begin)
    found = []
    for begin, end, steps in zip(begins, ends, own, strict=True):
        through = [steps + known[end]] if end in known else []
        through += [known[begin]] if begin in known else []
        found.append(Way(min(through, key=len)) if through else Way(steps, apart=end))
    return found


def _steps(recording: Recording) -> tuple[tuple[Comparison, Comparison, bool], ...]:
    steps = [(recording.before, recording.after, False)]
    if recording.host.compared:
        steps.append((*recording.host.compared, True))
    return tuple(steps)
