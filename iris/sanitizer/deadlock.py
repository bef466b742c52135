"""When can nobody go on any more?

Each rank says in memory that all share what it is doing, and how often it has changed memory so far. When every
program of a launch has polled in vain, and nothing has changed since before the first of them did, only another rank
can help. When all ranks are there at the same count of changes, or wait on the host, or are gone, nobody will.
"""

import mmap
import os
import time
from pathlib import Path

import numpy as np

ON_HOST, RUNS, STUCK, MEETS, GONE, POLLS = range(6)
"""What a rank is doing; STUCK: all of its programs poll in vain; POLLS: its host does."""

# Polls in vain, one after the other, that are taken for waiting.
ENOUGH = 32

# A rank that leaves a meeting may need so long to say so: where a rank is stuck in a kernel, and where none is.
LEAVING_S, LEAVING_HOSTS_S = 2.0, 5.0

# A host that polls has looked again within so many seconds: else it may have gone on to something else.
LOOKING_S = 2.0

# Of a rank: what it does, its changes, at which count of all changes it was stuck, and when it said so, in ms.
_WORDS = 4


class Onlooker:
    """Sees whether the ranks that take notes in ``folder`` can go on, from a process that is none of them."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "ranks"
        self._seen, self._since = b"", time.monotonic()

    def is_over(self) -> bool:
        """Whether the ranks have found that they cannot, or all that are left wait on the host for others."""
        words = self._words()
        if words.size and words[0]:
            return True
        # Those whose meeting is complete will leave it.
        if self.hosts_wait_s() < LEAVING_HOSTS_S:
            return False
        with open(self._file, "r+b") as file:
            file.write(np.int64(1).tobytes())
        return True

    def hosts_wait_s(self) -> float:
        """For how many seconds, as far as was looked, all that are left have waited on the host for others."""
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
    """By a clock that all processes of a host have."""
    return time.monotonic_ns() // 1_000_000


class Liveness:
    """What this rank says of itself, and sees of the others. Words of 8 bytes are written at once."""

    def __init__(self, folder: Path, rank: int, num_ranks: int) -> None:
        file = os.open(folder / "ranks", os.O_RDWR | os.O_CREAT, 0o600)
        os.posix_fallocate(file, 0, 8 * (1 + _WORDS * num_ranks))
        self._memory = mmap.mmap(file, 8 * (1 + _WORDS * num_ranks))
        os.close(file)
        words = np.frombuffer(self._memory, dtype=np.int64)
        self._over, self._ranks = words[:1], words[1:].reshape(num_ranks, _WORDS)
        self._mine = self._ranks[rank]
        self._unchanged_at, self._rounds = -1, 0
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

    def over(self) -> bool:
        """Whether somebody has found that nobody can go on."""
        return bool(self._over[0])

    def changes(self) -> int:
        """How often all ranks have changed memory."""
        return int(self._ranks[:, 1].sum())

    def polls(self, changes: int) -> bool:
        """The host of this rank looks in vain, at this count of changes, and long since: can anybody go on?"""
        self._mine[2:] = changes, _milliseconds()
        self._mine[0] = POLLS
        doing = self._ranks[:, 0]
        if (self._stuck(changes) | (doing == MEETS) | (doing == GONE)).all() and self.changes() == changes:
            self._over[0] = 1
        return self.over()

    def _stuck(self, changes: int) -> np.ndarray:
        """Which ranks poll in vain at this count of changes."""
        doing, at, when = self._ranks[:, 0], self._ranks[:, 2], self._ranks[:, 3]
        looks = (doing == POLLS) & (_milliseconds() - when < 1000 * LOOKING_S)
        return ((doing == STUCK) | looks) & (at == changes)

    def changed(self) -> None:
        """This rank has changed memory."""
        self._mine[1] += 1

    def is_over(self, repeats: int) -> bool:
        """All programs of this rank have polled in vain, each ``repeats`` times in a row: can anybody go on?"""
        changes = int(self._ranks[:, 1].sum())
        if changes != self._unchanged_at:
            self._unchanged_at, self._rounds, self._since = changes, 0, None
        self._rounds += 1
        # An atomic operation that changes nothing is no wait, but who does it so often in a row is waiting.
        if min(self._rounds, repeats) < ENOUGH:
            self._mine[0] = RUNS
            return self.over()
        self._mine[0], self._mine[2] = STUCK, changes
        doing, stuck = self._ranks[:, 0], self._stuck(changes)
        if not (stuck | (doing == MEETS) | (doing == GONE)).all() or int(self._ranks[:, 1].sum()) != changes:
            self._since = None
        elif stuck.all():
            self._over[0] = 1
        else:
            self._since = self._since or time.monotonic()
            if time.monotonic() - self._since > LEAVING_S:
                self._over[0] = 1
        return self.over()
