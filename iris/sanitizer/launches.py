"""A folder of event logs for each *launch*: ranks that a launcher has started together, and that form one world.

A program may start ranks several times. Then groups, heaps and ranks have the same names again, and no access of one
launch is ordered with any of another. So each launch is analysed by itself.
"""

import os
import time
from pathlib import Path

import torch.distributed as dist

from iris.compat.c10d import store_of

_KEY = "iris/sanitizer/launch"


def own_launch(folder: Path) -> Path:
    """The folder of the launch that this process is a rank of, within the program's folder.

    Not collective: the first rank that asks gives the name, in the store that the launch's ranks share. Names sort in
    the order in which the launches began.
    """
    name = f"launch-{time.time_ns():020}-{os.getpid()}"
    if dist.is_initialized():
        name = store_of(dist.group.WORLD).compare_set(_KEY, "", name).decode()
    return folder / name


def launches_in(folder: Path) -> list[Path]:
    """The folders of a program's launches, in the order in which they began."""
    return sorted(folder.glob("launch-*"))
