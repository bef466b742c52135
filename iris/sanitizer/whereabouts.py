"""At which lines the ranks of a program are when its time limit is over.

`check` asks each process before it kills them all, and reports the lines as a finding of the kind "deadlock".
"""

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from iris.errors import ProcessUnreachableError
from iris.sanitizer.findings import Finding, line_text
from iris.sanitizer.launches import launches_in
from iris.simulator import lines
from iris.simulator.lines import Line
from iris.world import inspection

# A frame as `inspection.find_threads` writes it.
_FRAME = re.compile(r"(?P<file>.+):(?P<number>\d+) in (?P<function>.*?): ")


def sign(folder: Path, rank: int) -> None:
    """Write into the folder that this process is ``rank``."""
    (folder / f"rank{rank}.process").write_text(str(os.getpid()))


def note(folder: Path, processes: list[int]) -> None:
    """Ask these processes where they are, and write their answers into the folder.

    Under torchrun each rank's command asks its own processes. The ranks are those of the program's latest launch.
    """
    signed = [file for launch in launches_in(folder)[-1:] for file in launch.glob("rank*.process")]
    ranks = {int(file.stem.removeprefix("rank")): int(file.read_text() or 0) for file in signed}
    with ThreadPoolExecutor(max(1, len(processes))) as pool:
        threads = dict(zip(processes, pool.map(_ask, processes), strict=True))
    answers = [{"rank": rank, "threads": threads.pop(process)} for rank, process in ranks.items() if process in threads]
    # Processes that are no ranks, as they have made no context.
    answers += [{"process": process, "threads": found} for process, found in threads.items() if found is not None]
    (folder / f"whereabouts.{os.getpid()}").write_text(json.dumps({"ranks": list(ranks), "processes": answers}))


def _ask(process: int) -> list[dict[str, Any]] | None:
    try:
        return inspection.ask(process)["threads"]
    except ProcessUnreachableError:  # it does not use Iris, or is no Python
        return None


def findings(folder: Path, time_limit: float) -> list[Finding]:
    """What `note` has written there, as a finding."""
    notes = [json.loads(file.read_text()) for file in folder.glob("whereabouts.*")]
    if not notes:
        return []
    answers = [each for note in notes for each in note["processes"]]
    ranks: dict[int, Any] = {rank: None for note in notes for rank in note["ranks"]}
    ranks |= {each["rank"]: each["threads"] for each in answers if "rank" in each}
    places = [place for rank, threads in sorted(ranks.items()) for place in _places(f"rank {rank}", threads)]
    # Other processes count only if there are no ranks.
    for each in answers if not ranks else ():
        places += _places(f"process {each['process']}", each["threads"])
    sentence = f"the program has not ended within {time_limit:g} s (--time-limit): " + (
        "; ".join(f"{who} {where}" for who, where in places) or "none of its processes uses Iris"
    )
    return [Finding("deadlock", sentence, places)]


def _places(who: str, threads: list[dict[str, Any]] | None) -> list[tuple[str, str]]:
    """The user's line that each thread is at: the main thread first, and others if they are at one."""
    if threads is None:
        return [(who, "has ended, or does not answer")]
    main, *others = threads
    found = [(who, f"is at {line_text(_line(main['stack'])[0])}")]
    for thread in others:
        line, is_users = _line(thread["stack"])
        if is_users:
            found.append((f"{who}, thread {thread['name']}", f"is at {line_text(line)}"))
    return found


def _line(stack: list[str]) -> tuple[Line, bool]:
    """The innermost line of the user's, or else of anybody's."""
    frames = [
        Line(found["file"], int(found["number"]), found["function"]) for found in map(_FRAME.match, stack) if found
    ]
    users = [line for line in frames if lines.owner_of(line.file) == lines.USER]
    return (users or frames or [lines.as_line(None)])[-1], bool(users)
