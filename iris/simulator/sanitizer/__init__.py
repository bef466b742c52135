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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from iris import inspection
from iris.files import written
from iris.simulator.sanitizer import locks
from iris.switches import switched_on

if TYPE_CHECKING:
    from iris.simulator.sanitizer.recorder import Recorder
    from iris.world import Group

Error = TypeVar("Error", bound=Exception)

VARIABLE, FOLDER_VARIABLE, SEED_VARIABLE = "IRIS_SANITIZE", "IRIS_SANITIZE_FOLDER", "IRIS_SANITIZE_SEED"

GAP = 4096
"""Bytes behind each allocation that belong to nobody, while somebody wants to know."""

recorder: "Recorder | None" = None
"""Takes down what this process does; None while nobody wants to know."""


def with_gaps(size: int) -> int:
    """The size of a heap in which tensors of ``size`` bytes in all have room for a gap behind each."""
    return 2 * size + (1 << 20)


def start(folder: Path, rank: int, num_ranks: int) -> None:
    """Take down what this process does from here on, as ``rank``, in a folder that all ranks share."""
    global recorder
    from iris.simulator.sanitizer import whereabouts
    from iris.simulator.sanitizer.recorder import Recorder

    with written(folder / f"rank{rank}.events"):
        whereabouts.sign(folder, rank)
        recorder = Recorder(folder, rank, num_ranks)


@contextlib.contextmanager
def recording(folder: Path, rank: int, num_ranks: int) -> Iterator[None]:
    """While this lasts, take down what this process does, as ``rank``, in a folder that all ranks share."""
    global recorder
    start(folder, rank, num_ranks)
    try:
        yield
    finally:
        if recorder is not None:
            recorder.close()
        recorder = None


def reported(error: Error) -> Error:
    """``error``, which the host is about to raise: a mistake of the program that is reported."""
    if recorder is not None:
        recorder.failed(error)
    return error


def mistake(kind: str, error: Error) -> Error:
    """``error``, which a program is about to raise: a mistake of its kernel, and a finding of this kind."""
    error.iris_finding = kind  # type: ignore[attr-defined]
    return error


def from_here(operation: Callable[[], None], mbarrier: int | None = None) -> Callable[[], None]:
    """``operation``, which will be carried out later, noted as the doing of the line that is being done now.

    It comes behind what has been done here by now, and in no order with what is done next. Who carries it out has
    waited for it; or, if it signals its end by the ``mbarrier`` at that address, who waits for that.
    """
    return operation if recorder is None else recorder.from_here(operation, mbarrier)


def beside(
    call: str, stream: Any, operation: Callable[..., Any], in_thread: bool
) -> tuple[Callable[..., Any], Callable[[Any], Any]]:
    """``operation``, which carries out a call that goes on beside the host, and how to sign the handle of the call.

    ``stream``: that on which it follows the calls before it. ``in_thread``: it is carried out in a thread of its own.
    """
    if recorder is None:
        return operation, lambda handle: handle
    return recorder.beside(call, stream, operation, in_thread)


def ended(handle: Any) -> None:
    """The current thread knows that the call is over of which ``handle`` is, if it is of one."""
    if recorder is not None:
        recorder.ended(handle)


def promised(handle: Any, future: Any) -> None:
    """Who waits for ``future`` knows that the call is over of which ``handle`` is."""
    if recorder is not None:
        recorder.promised(handle, future)


def start_if_wanted(group: "Group") -> None:
    """`start`, in a process that ``IRIS_SANITIZE=1`` wants to know everything of. Collective over the world.

    Who has not said where the notes belong, as ``python -m iris check`` does, is shown at the end what was found.
    """
    if not switched_on(VARIABLE) or recorder is not None:
        return
    rank, num_ranks = group.ranks[group.rank], max(group.ranks) + 1
    if FOLDER_VARIABLE in os.environ:
        from iris.simulator.sanitizer.launches import own_launch

        folder = own_launch(Path(os.environ[FOLDER_VARIABLE]))
    else:
        from iris.simulator.sanitizer.at_exit import report_at_exit

        folder = report_at_exit(group)
    start(folder, rank, num_ranks)
    if SEED_VARIABLE in os.environ:
        from iris.simulator import grid

        grid.chance = random.Random(f"{os.environ[SEED_VARIABLE]} of rank {rank}")


if switched_on(VARIABLE):
    locks.replace()

if FOLDER_VARIABLE in os.environ:
    # `check` asks where this process is, if it does not end: also one that has no context yet, or is a fork.
    inspection.listen()
    os.register_at_fork(after_in_child=inspection.listen)
