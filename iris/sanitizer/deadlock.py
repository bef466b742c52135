"""Finds deadlocks of all ranks: when can nobody go on any more?

The ranks share a file in memory, ``ranks``, of 64-bit words. In it each rank says what it is doing, and how often it
has changed memory so far. The sum of these counts is a time that all ranks agree on.

A rank is *stuck* at a sum if all programs of its launch have polled in vain, and nothing has changed since before the
first of them did. So only another rank can help it. It is a deadlock if at one and the same sum every rank is stuck, or
its host waits for others, or it is gone.
"""

import mmap
import os
import time
from pathlib import Path

import numpy as np

ON_HOST, RUNS, STUCK, MEETS, GONE, POLLS = range(6)
"""What a rank is doing:

* ON_HOST: its host runs
* RUNS: its kernels run
* STUCK: all programs of its launch poll in vain
* MEETS: its host waits for other ranks, in a collective or for a message
* GONE: it has ended
* POLLS: its host polls in vain
"""

# So many polls in vain, one after the other, are taken for waiting.
ENOUGH = 32

# How long a rank may need to say that it has left a collective: where some rank is stuck in a kernel; where none is.
LEAVING_S, LEAVING_HOSTS_S = 2.0, 5.0

# A host that polls looks again within so many seconds. If it has not, it may have gone on to something else.
LOOKING_S = 2.0

# Of a rank: what it does, how often it has changed memory, the sum of changes at which it was stuck, and the time in ms
# when it said so. The file begins with one word more: whether a deadlock was found.
_WORDS = 4


class DeadlockMonitor:
    """Watches the ranks that log their events in ``folder``, from a process that is none of them."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "ranks"
        self._seen, self._since = b"", time.monotonic()

    def is_deadlocked(self) -> bool:
        """Whether the ranks have found a deadlock, or the hosts of all that are left wait for others."""
        words = self._words()
        if words.size and words[0]:
            return True
        # A host whose collective is complete will soon leave it.
        if self.hosts_wait_s() < LEAVING_HOSTS_S:
            return False
        with open(self._file, "r+b") as file:
            file.write(np.int64(1).tobytes())
        return True

    def hosts_wait_s(self) -> float:
        """For how many seconds, as seen by calls of this method, the hosts of all that are left have waited for others.

        It looks once: call it again and again.
        """
        words = self._words()
        doing = words[1:].reshape(-1, _WORDS)[:, 0]
        waiting = MEETS in doing and np.isin(doing, (MEETS, GONE)).all()
        if not waiting or words.tobytes() != self._seen:
            self._seen, self._since = words.tobytes(), time.monotonic()
        return time.monotonic() - self._since

    def _words(self) -> np.ndarray:
        try:
            return np.fromfile(self._file, dtype=np.int64)
        except OSError:
            return np.zeros(0, dtype=np.int64)


def _milliseconds() -> int:
    """By a clock that all processes of a machine share."""
    return time.monotonic_ns() // 1_000_000


class Liveness:
    """What this rank says of itself in the shared file, and sees there of the others.

    No locks: a word of 8 bytes is written at once.
    """

    def __init__(self, folder: Path, rank: int, num_ranks: int) -> None:
        file = os.open(folder / "ranks", os.O_RDWR | os.O_CREAT, 0o600)
        os.posix_fallocate(file, 0, 8 * (1 + _WORDS * num_ranks))
        self._memory = mmap.mmap(file, 8 * (1 + _WORDS * num_ranks))
        os.close(file)
        words = np.frombuffer(self._memory, dtype=np.int64)
        self._deadlock_found, self._ranks = words[:1], words[1:].reshape(num_ranks, _WORDS)
        self._mine = self._ranks[rank]
        # At which sum of changes this rank last polled, how often in a row, and since when nobody could go on there.
        self._polled_at, self._rounds = -1, 0
        self._since: float | None = None
        self.on_host()

    def on_host(self) -> None:
        self._mine[0] = ON_HOST
        self.changed()

    def runs(self) -> None:
        self._mine[0] = RUNS
        self.changed()

    def meets(self) -> None:
        self._mine[0] = MEETS

    def leave(self) -> None:
        self._mine[0] = GONE

    def deadlock_found(self) -> bool:
        """Whether a rank, or a `DeadlockMonitor`, has found a deadlock."""
        return bool(self._deadlock_found[0])

    def changes(self) -> int:
        """How often all ranks together have changed memory."""
        return int(self._ranks[:, 1].sum())

    def host_polls(self, changes: int) -> bool:
        """The host of this rank has long polled in vain, at this sum of changes. Is it a deadlock?"""
        self._mine[2:] = changes, _milliseconds()
        self._mine[0] = POLLS
        doing = self._ranks[:, 0]
        if (self._stuck(changes) | (doing == MEETS) | (doing == GONE)).all() and self.changes() == changes:
            self._deadlock_found[0] = 1
        return self.deadlock_found()

    def _stuck(self, changes: int) -> np.ndarray:
        """By rank: whether its kernel or its host polls in vain, at this sum of changes."""
        doing, at, when = self._ranks[:, 0], self._ranks[:, 2], self._ranks[:, 3]
        looks = (doing == POLLS) & (_milliseconds() - when < 1000 * LOOKING_S)
        return ((doing == STUCK) | looks) & (at == changes)

    def changed(self) -> None:
        """This rank has changed memory."""
        self._mine[1] += 1

    def is_deadlocked(self, repeats: int) -> bool:
        """All programs of this rank have polled in vain, each ``repeats`` times in a row. Is it a deadlock?"""
        changes = self.changes()
        if changes != self._polled_at:
            self._polled_at, self._rounds, self._since = changes, 0, None
        self._rounds += 1
        # One atomic operation that changes nothing is no wait. So many in a row are.
        if min(self._rounds, repeats) < ENOUGH:
            self._mine[0] = RUNS
            return self.deadlock_found()
        self._mine[0], self._mine[2] = STUCK, changes
        doing, stuck = self._ranks[:, 0], self._stuck(changes)
        if not (stuck | (doing == MEETS) | (doing == GONE)).all() or self.changes() != changes:
            self._since = None
        elif stuck.all():
            self._deadlock_found[0] = 1
        else:
            # Some hosts wait for others: one of them may be about to go on, as its collective is complete.
            self._since = self._since or time.monotonic()
            if time.monotonic() - self._since > LEAVING_S:
                self._deadlock_found[0] = 1
        return self.deadlock_found()
