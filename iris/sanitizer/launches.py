"""A *launch*: ranks that were started together. Each is a world of its own, whose notes have a folder of their own.

A program may start ranks several times. Then groups, heaps and ranks have the same names again, and nothing of one
launch is in any order with another's.
"""

import os
import time
from pathlib import Path

import torch.distributed as dist

from iris.compat.c10d import store_of

_KEY = "iris/sanitizer/launch"


def own_launch(folder: Path) -> Path:
    """The folder of the launch that this process is a rank of, in that of the program: the same for all of its ranks.

    Not collective: the first rank that asks names it, in the store that all ranks of a launch share and no others.
    Names sort in the order in which the launches began.
    """
    name = f"launch-{time.time_ns():020}-{os.getpid()}"
    if dist.is_initialized():
        name = store_of(dist.group.WORLD).compare_set(_KEY, "", name).decode()
    return folder / name


def launches_in(folder: Path) -> list[Path]:
    """The folders of a program's launches, in the order in which they began."""
    return sorted(folder.glob("launch-*"))
