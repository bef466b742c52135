"""``python -m iris check``: runs a program under the sanitizer, and says what it found."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from iris.shared_folder import await_, leave, shared_folder
from iris.simulator.sanitizer import FOLDER_VARIABLE, SEED_VARIABLE, VARIABLE, findings
from iris.simulator.sanitizer.analysis import analyse
from iris.simulator.sanitizer.deadlock import Onlooker
from iris.simulator.sanitizer.findings import Finding

FOUND, FAILED = 1, 2
"""Exit statuses: something was found; the program failed, or could not be run, and nothing was found."""

# What the program gets to end by itself once its ranks are known to wait for each other.
ENDING_S = 10.0
# And where all that are left wait on the host for others.
ENDING_HOSTS_S = 2.0
INTERVAL_S = 0.05


def run(program: Path, arguments: Sequence[str], seed: int | None, schedules: int, form: str) -> int:
    """Run the program once for each schedule, until something is found; returns the exit status."""
    # Whoever ends this command ends the program with it.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    seeds = [seed] if schedules == 1 else [(seed or 0) + number for number in range(schedules)]
    for number, this in enumerate(seeds):
        with shared_folder("iris-check", number) as folder:
            status, found = _judge(program, arguments, folder, this)
        if status:
            seeds = [this]
            break
    # Under torchrun the first rank speaks for all. Who fails before it has spoken would end it.
    if int(os.environ.get("RANK", "0")):
        return 0
    _tell(found, form, seeds, failed=status == FAILED)
    return status


def _judge(program: Path, arguments: Sequence[str], folder: Path, seed: int | None) -> tuple[int, list[Finding]]:
    """One run: its exit status, and what was found. Under torchrun the first rank judges for all."""
    failed = _run_once(program, arguments, folder, seed)
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    leave(folder / f"over{rank}", failed)
    verdict = folder / "verdict"
    if rank:
        await_(verdict.exists)
        return int(verdict.read_text()), []
    await_(lambda: len(list(folder.glob("over*"))) == size)
    found = analyse(folder)
    any_failed = any(path.read_text() != "0" for path in folder.glob("over*"))
    status = FOUND if found else FAILED if any_failed else 0
    leave(verdict, status)
    return status, found


def findings_of(program: Path | str, *arguments: str, seed: int | None = None) -> list[Finding]:
    """What is wrong in one run of a program that starts its own ranks.

    Raises
    ------
    subprocess.CalledProcessError
        It failed, and nothing was found to be the reason.
    """
    with tempfile.TemporaryDirectory(prefix="iris-check-") as folder:
        status = _run_once(Path(program), arguments, Path(folder), seed)
        found = analyse(Path(folder))
    if status and not found:
        raise subprocess.CalledProcessError(status, [str(program), *arguments])
    return found


def _run_once(program: Path, arguments: Sequence[str], folder: Path, seed: int | None) -> int:
    # In debug mode allocations know the lines that made them.
    environment = os.environ | {
        VARIABLE: "1", FOLDER_VARIABLE: str(folder), "IRIS_SIMULATOR": "1", "IRIS_DEBUG": "1",
    }  # fmt: skip
    if seed is not None:
        environment[SEED_VARIABLE] = str(seed)
    # What the program prints is not part of the report.
    process = subprocess.Popen(
        [sys.executable, program, *arguments], env=environment, stdout=sys.stderr, start_new_session=True
    )
    try:
        onlooker, over_since = Onlooker(folder), None
        while process.poll() is None:
            time.sleep(INTERVAL_S)
            if over_since is None and onlooker.is_over():
                over_since = time.monotonic()
            if over_since is None:
                continue
            if time.monotonic() - over_since > ENDING_S or onlooker.hosts_wait_s() > ENDING_HOSTS_S:
                break
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return process.returncode


def _tell(found: list[Finding], form: str, seeds: list[int | None], failed: bool) -> None:
    """``seeds``: of all runs in which nothing was found, or of the one in which something was."""
    if form == "json":
        print(findings.as_json(found))
        return
    for finding in found:
        print(finding)
    again = f" with --seed {seeds[0]}" if seeds[0] is not None else ""
    again += f" to {seeds[-1]}" if len(seeds) > 1 else ""
    why = "; the program failed for another reason, told above" if failed else ""
    print(f"iris-check: {len(found) or 'nothing'} found{again}{why}.")
