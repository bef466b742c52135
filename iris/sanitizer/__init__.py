"""Finds what one-sided programs do wrong: the simulator sees every access of every rank.

Each rank takes down what it does (`recorder`, and `host` for what it does with torch) in a file (`notes`). Afterwards,
`analysis` goes through the notes of all ranks in an order in which they could have been made, with a vector clock for
each program (`clocks`); for each byte there is who wrote and read it last (`shadow`). What no release and acquire has
put in order is a data race (`races`), whichever came first this time, and whatever more of its flag a wait has seen
than it asks for (`waits`).
What shows at once is noted where it happens: accesses outside of allocations (`bounds`), and programs of which none can
go on (`deadlock`).

``python -m iris check`` runs a program with ``IRIS_SANITIZE=1``, and reports (`check`).
"""

import contextlib
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from iris import observer
from iris.commands.files import written
from iris.sanitizer import locks
from iris.sanitizer.settings import FOLDER_VARIABLE, SEED_VARIABLE, VARIABLE
from iris.switches import switched_on
from iris.world import inspection, late_rails

if TYPE_CHECKING:
    from iris.world import Group


def start(folder: Path, rank: int, num_ranks: int) -> None:
    """Take down what this process does from here on, as ``rank``, in a folder that all ranks share."""
    from iris.sanitizer import whereabouts
    from iris.sanitizer.recorder import Recorder

    with written(folder / f"rank{rank}.events"):
        whereabouts.sign(folder, rank)
        observer.recorder = Recorder(folder, rank, num_ranks)


@contextlib.contextmanager
def recording(folder: Path, rank: int, num_ranks: int) -> Iterator[None]:
    """While this lasts, take down what this process does, as ``rank``, in a folder that all ranks share."""
    start(folder, rank, num_ranks)
    try:
        yield
    finally:
        if observer.recorder is not None:
            observer.recorder.close()
        observer.recorder = None


def start_if_wanted(group: "Group") -> None:
    """`start`, in a process that ``IRIS_SANITIZE=1`` wants to know everything of. Collective over the world.

    Who has not said where the notes belong, as ``python -m iris check`` does, is shown at the end what was found.
    """
    if not switched_on(VARIABLE) or observer.recorder is not None:
        return
    rank, num_ranks = group.ranks[group.rank], max(group.ranks) + 1
    if FOLDER_VARIABLE in os.environ:
        from iris.sanitizer.launches import own_launch

        folder = own_launch(Path(os.environ[FOLDER_VARIABLE]))
    else:
        from iris.sanitizer.at_exit import report_at_exit

        folder = report_at_exit(group)
    start(folder, rank, num_ranks)
    if SEED_VARIABLE in os.environ:
        from iris.simulator import grid

        grid.chance = random.Random(f"{os.environ[SEED_VARIABLE]} of rank {rank}")
        late_rails.chance = random.Random(f"{os.environ[SEED_VARIABLE]} of the rails of rank {rank}")


def prepare_process() -> None:
    """What a process that the environment wants to be watched does from its beginning on."""
    if switched_on(VARIABLE):
        locks.replace()
    if FOLDER_VARIABLE in os.environ:
        # `check` asks where this process is, if it does not end: also one that has no context yet, or is a fork.
        inspection.listen()
        os.register_at_fork(after_in_child=inspection.listen)


observer.on_join.append(start_if_wanted)
prepare_process()
