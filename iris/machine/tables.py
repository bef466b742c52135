"""Files of what was measured, by the GPU's name: one of each kind ships with Iris, and a user may have another.

``python -m iris tune`` measures the machine at hand and writes the user's own, below `own_folder`.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from iris.errors import InvalidTableError
from iris.log import logger

# Which algorithm carries a collective (`iris.ccl.select`), and by what a fused operation is chosen
# (`iris.machine.figures`).
COLLECTIVES, OPERATIONS = "collectives.json", "operations.json"
SHIPPED = Path(__file__).parent

T = TypeVar("T")


def own_folder() -> Path | None:
    """Where this user's own tables are; None for a user who has no home."""
    try:
        config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    except RuntimeError:  # HOME is not set, and the system does not know the user
        return None
    return Path(config) / "iris"


def read(name: str, take: Callable[[dict[str, Any]], T]) -> list[tuple[Path, T]]:
    """The files of this name, the shipped one first, each with what ``take`` finds in its object.

    A shipped file must be there. Raises `InvalidTableError`, which names the file, if it is not, and if ``take`` cannot
    use what a file holds.
    """
    shipped = _shipped(SHIPPED / name)
    found = [(SHIPPED / name, _taken(SHIPPED / name, shipped, take, "Install Iris anew."))]
    folder = own_folder()
    own = _own(folder / name) if folder else None
    if folder and own is not None:
        remedy = "Remove it; `python -m iris tune` makes a new one."
        found.append((folder / name, _taken(folder / name, own, take, remedy)))
    return found


def _shipped(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except FileNotFoundError as error:
        raise InvalidTableError(f"{file} is missing: Iris is not installed whole. Install it anew.") from error
    except OSError as error:
        raise InvalidTableError(f"{file} of Iris cannot be read: {error.strerror}.") from error


def _own(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        # Of a home that this user may not enter, too, where there need not be a table.
        logger.info("The table %s cannot be read (%s): going on without it.", file, error.strerror)
        return None


def _taken(file: Path, content: bytes, take: Callable[[dict[str, Any]], T], remedy: str) -> T:
    try:
        entries = json.loads(content)
        if not isinstance(entries, dict):
            raise ValueError("it is no object of entries by the GPU's name")
        return take(entries)
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidTableError(f"{file} is no table that Iris can use: {error}. {remedy}") from error
