"""A folder in which the ranks of one run leave files for each other, for commands that run a program on every rank."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

INTERVAL_S = 0.05


@contextmanager
def shared_folder(name: str, number: int = 0) -> Iterator[Path]:
    """The same one for all ranks of a torchrun, of which each runs this, with equal arguments; else one of its own."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        with tempfile.TemporaryDirectory(prefix=f"{name}-") as folder:
            yield Path(folder)
        return
    # The agent that started the ranks is the parent of all, and its port nobody else's.
    own = f"{name}-{os.getuid()}-{os.environ['MASTER_PORT']}-{os.getppid()}-{number}"
    folder = Path(tempfile.gettempdir()) / own
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} is another user's, so what is in it cannot be trusted.")
    yield folder
    # The last to leave takes it away: whoever has read what the others left has nothing more to say.
    (folder / f"left{os.environ['RANK']}").touch()
    if len(list(folder.glob("left*"))) == int(os.environ["WORLD_SIZE"]):
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Where to write a file for other ranks: it is at ``path`` when it is whole."""
    unfinished = path.with_name(f"unfinished-{path.name}")
    yield unfinished
    unfinished.rename(path)


def leave(path: Path, status: int) -> None:
    """Tell the other ranks a number."""
    with whole(path) as file:
        file.write_text(str(status))


def await_(condition: Callable[[], bool]) -> None:
    """Until it holds."""
    while not condition():
        time.sleep(INTERVAL_S)
