"""A rank's log of events (`iris.sanitizer.events`): a file in a folder that all ranks share.

``rank<n>.events`` has the events of rank n, pickled one after the other. ``counter`` has two 64-bit numbers that all
ranks count up together: the number of the next operation that orders ranks, and how often any rank has written to
what others may poll.
"""

import contextlib
import fcntl
import mmap
import os
import pickle
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from iris.errors import FolderError
from iris.sanitizer.events import Known, Place


class EventLog:
    """The log that this process writes, as ``rank``, and the counters of all ranks."""

    def __init__(self, folder: Path, rank: int) -> None:
        # Launches of several threads take turns, but their hosts' operations run at the same time.
        self._one_thread = threading.RLock()
        self._file = open(folder / f"rank{rank}.events", "ab")
        self._places: dict[Place, int] = {}
        # The file of the counters is locked while a rank takes a number.
        self._lock = os.open(folder / "counter", os.O_RDWR | os.O_CREAT, 0o600)
        # Without room for it on the disk, a page of the mapping would kill the process when it is touched.
        os.posix_fallocate(self._lock, 0, 16)
        self._counter = mmap.mmap(self._lock, 16)

    def add(self, event: Any) -> None:
        """Write ``event`` to the file at once, not to a buffer alone.

        A race may make one rank fail, and the launcher then kills the others. If a release were lost in a buffer, its
        acquire would look like a race, too.
        """
        with self._one_thread:
            if self._file.closed:  # another thread has closed it, and this one goes on
                return
            try:
                pickle.dump(event, self._file, protocol=pickle.HIGHEST_PROTOCOL)
                self._file.flush()
            except OSError as error:
                raise FolderError(
                    f"What this rank does cannot be noted in {self._file.name}: {error.strerror}. The event logs of a "
                    "long program are gigabytes; TMPDIR names another place for them."
                ) from error

    def number_of(self, place: Place) -> int:
        """The number by which events name ``place``."""
        with self._one_thread:
            if place not in self._places:
                self._places[place] = len(self._places)
                self.add(Known(self._places[place], place))
            return self._places[place]

    @contextlib.contextmanager
    def numbered(self) -> Iterator[int]:
        """Around an operation that orders ranks; gives its number. No other rank does such an operation meanwhile."""
        fcntl.lockf(self._lock, fcntl.LOCK_EX)
        try:
            (number,) = struct.unpack_from("q", self._counter)
            struct.pack_into("q", self._counter, 0, number + 1)
            yield number
        finally:
            fcntl.lockf(self._lock, fcntl.LOCK_UN)

    def changes(self) -> int:
        """How often a rank has written to what others may poll."""
        return struct.unpack_from("q", self._counter, 8)[0]

    def count_change(self) -> None:
        """This rank has written to what others may poll. Call it inside `numbered`."""
        struct.pack_into("q", self._counter, 8, self.changes() + 1)

    @property
    def closed(self) -> bool:
        return self._file.closed

    def close(self) -> None:
        with self._one_thread:
            self._file.close()
        self._counter.close()
        os.close(self._lock)


def read_events(folder: Path) -> dict[int, Iterator[Any]]:
    """The events of each rank, from the files in ``folder``."""

    def events(path: Path) -> Iterator[Any]:
        with open(path, "rb") as file:
            while True:
                try:
                    yield pickle.load(file)
                except (EOFError, pickle.UnpicklingError):  # the end, or the process was killed while it wrote
                    return

    return {int(path.stem.removeprefix("rank")): events(path) for path in folder.glob("rank*.events")}
