"""A rank's notes: a file of its events, in the order in which they were made, in a folder that all ranks share."""

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


class Notes:
    """Those of this process, as ``rank``, which it writes; and what the ranks count together."""

    def __init__(self, folder: Path, rank: int) -> None:
        # Launches of several threads of Python take turns, but what the host does in one goes on beside another's.
        self._one_thread = threading.RLock()
        self._file = open(folder / f"rank{rank}.events", "ab")
        self._places: dict[Place, int] = {}
        # The counters of all ranks: a file that is locked while one of them takes a number.
        self._lock = os.open(folder / "counter", os.O_RDWR | os.O_CREAT, 0o600)
        # A page of a mapping for which the disk has no room would end the process when it is touched.
        os.posix_fallocate(self._lock, 0, 16)
        self._counter = mmap.mmap(self._lock, 16)

    def add(self, event: Any) -> None:
        """Written at once: a race makes one rank fail, and whoever has started the others ends them on the spot. If a
        release were lost with a rank, what others have acquired would look like a race, too.
        """
        with self._one_thread:
            if self._file.closed:  # by another thread than the one that goes on
                return
            try:
                pickle.dump(event, self._file, protocol=pickle.HIGHEST_PROTOCOL)
                self._file.flush()
            except OSError as error:
                raise FolderError(
                    f"What this rank does cannot be noted in {self._file.name}: {error.strerror}. The notes of a long "
                    "program are gigabytes; TMPDIR names another place for them."
                ) from error

    def number_of(self, place: Place) -> int:
        """By which events name it."""
        with self._one_thread:
            if place not in self._places:
                self._places[place] = len(self._places)
                self.add(Known(self._places[place], place))
            return self._places[place]

    @contextlib.contextmanager
    def numbered(self) -> Iterator[int]:
        """While this lasts no other rank does anything that orders ranks."""
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
        """This one has; inside of `numbered`."""
        struct.pack_into("q", self._counter, 8, self.changes() + 1)

    @property
    def closed(self) -> bool:
        return self._file.closed

    def close(self) -> None:
        with self._one_thread:
            self._file.close()
        self._counter.close()
        os.close(self._lock)


def notes_in(folder: Path) -> dict[int, Iterator[Any]]:
    """What the ranks have noted in a folder, by rank."""

    def events(path: Path) -> Iterator[Any]:
        with open(path, "rb") as file:
            while True:
                try:
                    yield pickle.load(file)
                except (EOFError, pickle.UnpicklingError):  # the process was ended while it wrote
                    return

    return {int(path.stem.removeprefix("rank")): events(path) for path in folder.glob("rank*.events")}
