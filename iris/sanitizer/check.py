"""``python -m iris check``: runs a program under the sanitizer, analyses the event logs of its ranks, and reports."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from iris.commands.program import as_command, command_line, members, running
from iris.commands.shared_folder import await_, leave, own_folder, shared_folder
from iris.sanitizer import findings, whereabouts
from iris.sanitizer.analysis import analyse
from iris.sanitizer.deadlock import DeadlockMonitor
from iris.sanitizer.findings import Finding, united
from iris.sanitizer.launches import launches_in
from iris.sanitizer.settings import FOLDER_VARIABLE, SEED_VARIABLE, VARIABLE

FOUND, FAILED = 1, 2
"""Exit statuses: something was found; the program failed, or could not be run, and nothing was found."""

TIME_LIMIT_S = 300.0
"""The default of ``--time-limit``, for each run."""

# After a deadlock was found, the program gets so long to end by itself,
ENDING_S = 10.0
# or so long if the hosts of all ranks that are left wait for others.
ENDING_HOSTS_S = 2.0
INTERVAL_S = 0.05


def run(command: Sequence[str], seed: int | None, schedules: int, form: str, time_limit: float) -> int:
    """Run the program once for each schedule, until something is found; returns the exit status.

    ``command``: the `iris.commands.program.command_line` of the program. ``time_limit``: in seconds, of each run; 0 for
    none.
    """
    seeds: list[int | None] = [seed] if schedules == 1 else [(seed or 0) + number for number in range(schedules)]
    with as_command():
        for number, this in enumerate(seeds):
            with shared_folder("iris-check", number) as folder:
                status, found = _judge(command, folder, this, time_limit)
            if status:
                seeds = [this]
                break
    # Under torchrun the first rank reports for all. If another one failed before that, torchrun would kill the first.
    if int(os.environ.get("RANK", "0")):
        return 0
    _print(found, form, seeds, failed=status == FAILED)
    return status


def _judge(command: Sequence[str], folder: Path, seed: int | None, time_limit: float) -> tuple[int, list[Finding]]:
    """One run: its exit status, and what was found. Under torchrun the first rank analyses the event logs of all."""
    failed = _run_once(command, folder, seed, time_limit)
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    leave(folder / f"over{rank}", failed)
    verdict = folder / "verdict"
    if rank:
        await_(verdict.exists)
        return int(verdict.read_text()), []
    await_(lambda: len(list(folder.glob("over*"))) == size)
    found = _found_in(folder, time_limit)
    any_failed = any(path.read_text() != "0" for path in folder.glob("over*"))
    status = FOUND if found else FAILED if any_failed else 0
    leave(verdict, status)
    return status, found


def findings_of(
    program: Path | str, *arguments: str, seed: int | None = None, time_limit: float = TIME_LIMIT_S
) -> list[Finding]:
    """What is wrong in one run of a program that starts its own ranks.

    Raises
    ------
    subprocess.CalledProcessError
        The program failed, and nothing was found.
    """
    command = command_line(Path(program), arguments)
    folder = own_folder("iris-check")
    try:
        status = _run_once(command, folder, seed, time_limit)
        found = _found_in(folder, time_limit)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if status and not found:
        raise subprocess.CalledProcessError(status, command)
    return found


def _run_once(command: Sequence[str], folder: Path, seed: int | None, time_limit: float) -> int:
    """Run the program until it ends, its ranks are in a deadlock, or its time is over. Returns its exit status."""
    # In debug mode allocations know the lines that made them.
    settings = {VARIABLE: "1", FOLDER_VARIABLE: str(folder), "IRIS_SIMULATOR": "1", "IRIS_DEBUG": "1"}
    if seed is not None:
        settings[SEED_VARIABLE] = str(seed)
    # The program's output goes to stderr: stdout is for the report.
    with running(command, settings, stdout=sys.stderr) as process:
        begin, launch, monitor, over_since = time.monotonic(), folder, DeadlockMonitor(folder), None
        while process.poll() is None:
            time.sleep(INTERVAL_S)
            now = time.monotonic()
            latest = max(launches_in(folder), default=folder)
            if latest != launch:
                # The program has started ranks again, so the launch before is over.
                launch, monitor, over_since = latest, DeadlockMonitor(latest), None
            if over_since is None and monitor.is_deadlocked():
                over_since = now
            if over_since is not None and (now - over_since > ENDING_S or monitor.hosts_wait_s() > ENDING_HOSTS_S):
                break
            if over_since is None and time_limit and now - begin > time_limit:
                whereabouts.note(folder, members())
                break
    return process.returncode


def _found_in(folder: Path, time_limit: float) -> list[Finding]:
    found = [finding for launch in launches_in(folder) for finding in analyse(launch)]
    return united(found) + whereabouts.findings(folder, time_limit)


def _print(found: list[Finding], form: str, seeds: list[int | None], failed: bool) -> None:
    """``seeds``: of all runs in which nothing was found, or of the one in which something was."""
    if form == "json":
        print(findings.as_json(found))
        return
    for finding in found:
        print(finding)
    again = f" with --seed {seeds[0]}" if seeds[0] is not None else ""
    again += f" to {seeds[-1]}" if len(seeds) > 1 else ""
    why = "; the program failed for another reason, reported above" if failed else ""
    print(f"iris-check: {len(found) or 'nothing'} found{again}{why}.")
