"""Folders in which the ranks of one run leave files for each other, for commands that run a program on every rank.

The folder for temporary files is open to all users of the machine. So no name in it is taken for this run's own before
it is known to be a folder of this user that nobody else may enter.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from iris.commands.files import written
from iris.commands.program import undisturbed
from iris.errors import FolderError

INTERVAL_S = 0.05


def own_folder(name: str) -> Path:
    """A new folder for temporary files, which this user alone may enter. Who asks for it removes it.

    Raises
    ------
    FolderError
        There is no place for temporary files.
    """
    try:
        return Path(tempfile.mkdtemp(prefix=f"{name}-"))
    except OSError as error:
        raise FolderError(f"No folder for temporary files can be made: {error}. TMPDIR names another place.") from error


@contextmanager
def shared_folder(name: str, number: int = 0) -> Iterator[Path]:
    """A folder that all ranks of one torchrun share; each of them calls this with equal arguments.

    Without torchrun, a folder of this process alone. The last rank that leaves the block removes the folder, also if it
    leaves by an error or a signal. Raises `FolderError` if there is no place for the folder, or it is another user's.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        folder = own_folder(name)
        try:
            yield folder
        finally:
            with undisturbed():
                shutil.rmtree(folder, ignore_errors=True)
        return
    # The agent that started the ranks is the parent of all, and nobody else has its port. The system uses numbers of
    # processes again, but not with the same time of start.
    own = f"{name}-{os.getuid()}-{os.environ['MASTER_PORT']}-{os.getppid()}-{_start_of(os.getppid())}-{number}"
    folder = _temporary() / own
    here = _enter(folder)
    try:
        yield folder
    finally:
        with undisturbed():
            # Each rank that is there holds a shared lock. Who gets the only one is the last.
            fcntl.flock(here, fcntl.LOCK_UN)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(here, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(here, folder):
                    shutil.rmtree(folder, ignore_errors=True)
            os.close(here)


def _temporary() -> Path:
    try:
        return Path(tempfile.gettempdir())
    except OSError as error:
        raise FolderError(f"There is no place for temporary files: {error}. TMPDIR names one.") from error


def _start_of(process: int) -> str:
    """When it was started, in ticks of the system's clock (proc(5), ``stat``, the 22nd field)."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]


def _enter(folder: Path) -> int:
    """Make the folder, if no other rank has; returns a descriptor of it that holds the shared lock."""
    while True:
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)
            try:
                here = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:  # the last of other ranks has removed it since
                continue
        except OSError as error:
            # ENOTDIR: O_NOFOLLOW and O_DIRECTORY of a symbolic link.
            raise FolderError(
                f"The folder {folder}, in which the ranks leave files, cannot be used: {error}."
            ) from error
        _check_own(here, folder)
        fcntl.flock(here, fcntl.LOCK_SH)
        # Between the opening and the lock the last of other ranks may have removed it, too.
        if _is_at(here, folder):
            return here
        os.close(here)


def _check_own(here: int, folder: Path) -> None:
    status = os.fstat(here)
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        os.close(here)
        raise FolderError(
            f"The folder {folder}, in which the ranks leave files, is user {status.st_uid}'s, or open to other users: "
            "what is in it cannot be trusted. Remove it, or set TMPDIR to a folder of your own."
        )


def _is_at(here: int, folder: Path) -> bool:
    """Whether the open folder is the one at that path, and not one that was removed."""
    try:
        return os.path.samestat(os.fstat(here), os.lstat(folder))
    except FileNotFoundError:
        return False


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Where to write a file for other ranks: it is at ``path`` when it is whole."""
    unfinished = path.with_name(f"unfinished-{path.name}")
    with written(path):
        yield unfinished
        unfinished.rename(path)


def leave(path: Path, status: int) -> None:
    """Leave the other ranks a number."""
    with whole(path) as file:
        file.write_text(str(status))


def await_(condition: Callable[[], bool]) -> None:
    """Return when ``condition`` holds; the caller sees to it that it will."""
    while not condition():
        time.sleep(INTERVAL_S)
