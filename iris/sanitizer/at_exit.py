"""What a program that nobody checks from outside reports when it ends.

Its ranks may be killed, the first as well, when a race has made one of them fail. So a process beside them reports.
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

# What peers get to end, once the first rank has: they may be waiting for it, until whoever started them ends them.
PATIENCE_S = 30.0

# In the folder: a pipe that each rank holds open as long as it lives. Who reads it comes to its end when all are gone.
ALIVE = "alive"


def report_at_exit(group: "Group") -> Path:
    """A folder for the ranks' notes. Once all have ended, however they did, the first rank reports what was found in
    them, and has exit status 1 then. Collective over the world.
    """

    def make_folder() -> str | None:
        if group.rank:
            return None
        made = own_folder("iris-check")
        os.mkfifo(made / ALIVE)
        return str(made)

    name = group.agree(make_folder, "make a folder for the notes of all ranks")[0]
    assert name is not None  # of the first rank
    folder = Path(name)
    # For reading, too: to open a pipe for nothing but writing takes a reader (fifo(7)).
    alive = os.open(folder / ALIVE, os.O_RDWR)
    if group.rank == 0:
        reporter = _start_reporter(folder)
        # After the recorder's own, which ends its notes.
        Finalize(None, _await_report, (reporter, alive), exitpriority=1)
    return folder


def _start_reporter(folder: Path) -> subprocess.Popen:
    environment = os.environ | {"IRIS_SIMULATOR": "1", VARIABLE: "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    with open(folder / ALIVE, "rb") as alive:
        # In a session of its own: who ends a program may end its group of processes.
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
    sys.stdin.buffer.read()
    found = analyse(folder)
    shutil.rmtree(folder, ignore_errors=True)
    for finding in found:
        print(finding, file=sys.stderr)
    return FOUND if found else 0


if __name__ == "__main__":
    sys.exit(_report(Path(sys.argv[1])))
