"""Files that a user names: an error says which one cannot be written, and why."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from iris.errors import FolderError, IrisError


def check_writable(path: Path) -> None:
    """Raise `FolderError` if no file can be made at ``path``: before the work that it is for."""
    if path.is_dir():
        raise FolderError(f"{path} cannot be written: it is a folder. Give another name, or remove it.")
    there = next(each for each in (path, *path.absolute().parents) if os.path.lexists(each) or each == Path("/"))
    if not os.access(there, os.W_OK) or not (there == path or there.is_dir()):
        raise FolderError(f"{path} cannot be written: {there} is no folder that this user may write to.")


@contextlib.contextmanager
def written(path: Path) -> Iterator[None]:
    """While the block writes ``path``, whose folder is made."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except IrisError:
        raise
    except OSError as error:
        raise FolderError(f"{path} cannot be written: {error}.") from error
