"""A race detector for one-sided programs, which also finds deadlocks, wrong accesses and uninitialised reads.

It works on what the simulator sees: every access of every rank. There are two halves.

**While a program runs**, each rank records what it does as events (`events`), in a file (`event_log`).

* `recorder` records what kernels do: the simulator calls it, through `iris.observer`.
* `host_recorder` records what the host does. It learns that from a torch dispatch mode (`host`, `meetings`), and from
  functions that replace those of Python's threads and locks (`threads`, `interceptors`, `locks`).
* Mistakes that show at once are found here: accesses outside of allocations (`bounds`), and deadlocks (`deadlock`).

**Afterwards**, `analysis` goes through the events of all ranks.

* It gives each program and each thread of a host a vector clock (`clocks`), and joins the clocks as releases and
  acquires ask for.
* `races` compares each access with those that shadow memory (`shadow`) has of the same bytes. Two accesses of which
  neither happens before the other are a data race, whichever came first in this run.
* A wait may see more of its flag than it asks for. What that would order by luck alone, orders nothing (`flags`).
* `findings` words the reports.

``python -m iris check`` runs a program with ``IRIS_SANITIZE=1`` and reports (`check`). A program that is run with
``IRIS_SANITIZE=1`` otherwise reports when it ends (`at_exit`).
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
    """Record what this process does from here on, as ``rank``, in a folder that all ranks share."""
    from iris.sanitizer import whereabouts
    from iris.sanitizer.recorder import Recorder

    with written(folder / f"rank{rank}.events"):
        whereabouts.sign(folder, rank)
        observer.recorder = Recorder(folder, rank, num_ranks)


@contextlib.contextmanager
def recording(folder: Path, rank: int, num_ranks: int) -> Iterator[None]:
    """While this lasts, record what this process does, as ``rank``, in a folder that all ranks share."""
    start(folder, rank, num_ranks)
    try:
        yield
    finally:
        if observer.recorder is not None:
            observer.recorder.close()
        observer.recorder = None


def start_if_wanted(group: "Group") -> None:
    """`start`, if ``IRIS_SANITIZE=1``. Collective over the world.

    ``python -m iris check`` names a folder for the event logs. Without one, the program itself reports when it ends.
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
    """What has to be done at the beginning of a process that the environment wants to be recorded."""
    if switched_on(VARIABLE):
        locks.replace()
    if FOLDER_VARIABLE in os.environ:
        # `check` asks a process that does not end where it is. That may be a fork, or one without a context yet.
        inspection.listen()
        os.register_at_fork(after_in_child=inspection.listen)


observer.on_join.append(start_if_wanted)
prepare_process()
