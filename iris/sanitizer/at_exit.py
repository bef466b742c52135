"""The report of a program that runs with ``IRIS_SANITIZE=1`` but not under ``python -m iris check``.

When a race makes one rank fail, a launcher kills the others, and so perhaps the first rank, too. So no rank makes the
report, but a process beside them: this module, run as a program.
"""

import os
import shutil
import subprocess
import sys
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING

from iris.commands.shared_folder import own_folder
from iris.sanitizer.analysis import analyse
from iris.sanitizer.check import FOUND
from iris.sanitizer.settings import VARIABLE

if TYPE_CHECKING:
    from iris.world import Group

# How long the first rank waits for the report. Its peers may be waiting for it to end, until the launcher kills them.
PATIENCE_S = 30.0

# A pipe in the folder, which each rank holds open as long as it lives. A reader comes to its end when all are gone.
ALIVE = "alive"


def report_at_exit(group: "Group") -> Path:
    """Make a folder for the ranks' event logs, and see to a report once all ranks have ended in whatever way.

    If anything was found, the first rank ends with exit status 1. Collective over the world.
    """

    def make_folder() -> str | None:
        if group.rank:
            return None
        made = own_folder("iris-check")
        os.mkfifo(made / ALIVE)
        return str(made)

    name = group.agree(make_folder, "make a folder for the event logs of all ranks")[0]
    assert name is not None  # of the first rank
    folder = Path(name)
    # For reading, too: to open a pipe only for writing blocks until there is a reader (fifo(7)).
    alive = os.open(folder / ALIVE, os.O_RDWR)
    if group.rank == 0:
        reporter = _start_reporter(folder)
        # It runs after the recorder's own, which closes the event log.
        Finalize(None, _await_report, (reporter, alive), exitpriority=1)
    return folder


def _start_reporter(folder: Path) -> subprocess.Popen:
    environment = os.environ | {"IRIS_SIMULATOR": "1", VARIABLE: "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    with open(folder / ALIVE, "rb") as alive:
        # In a session of its own: a launcher may kill the program's whole process group.
        return subprocess.Popen(
            [sys.executable, "-m", __name__, folder],
            env=environment,
            stdin=alive,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )


def _await_report(reporter: subprocess.Popen, alive: int) -> None:
    os.close(alive)
    try:
        found = reporter.wait(PATIENCE_S) == FOUND
    except subprocess.TimeoutExpired:
        return
    if found:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(FOUND)


def _report(folder: Path) -> int:
    """Wait until all ranks have ended, and report. Returns the exit status."""
    sys.stdin.buffer.read()
    found = analyse(folder)
    shutil.rmtree(folder, ignore_errors=True)
    for finding in found:
        print(finding, file=sys.stderr)
    return FOUND if found else 0


if __name__ == "__main__":
    sys.exit(_report(Path(sys.argv[1])))
