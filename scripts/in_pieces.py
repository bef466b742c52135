"""Runs pytest with the arguments given, in pieces that end, and leaves out the pieces that have passed before.

    python scripts/in_pieces.py tests/ccl --ignore tests/ccl/test_room.py

A piece is some tests of one file, in a process of its own. One that fails, or takes longer than an hour, is said at the
end and stops no other. A piece that has passed is not run again while the sources and the settings are what they were.
So a run of hours goes on where it was interrupted, with the same command. What passed is noted in `.pieces/`.
"""

import hashlib
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

PASSED = Path(".pieces")
TESTS_OF_A_PIECE = 40
LIMIT_S = 3600
# Ends pytest's run without an error: all passed, and nothing to run.
ALL_PASSED, NONE_FOUND = 0, 5


def collect(arguments: list[str]) -> list[str]:
    """The tests, by their names on pytest's command line."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *arguments]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if found.returncode not in (ALL_PASSED, NONE_FOUND):
        sys.exit(found.stdout + "The tests cannot be collected, see above.")
    # After an empty line follow warnings, which may name tests too.
    return [line for line in itertools.takewhile(bool, found.stdout.splitlines()) if "::" in line]


def pieces(tests: list[str]) -> list[list[str]]:
    """Of one file each, in their order."""
    found = []
    for _, of_file in itertools.groupby(tests, key=lambda test: test.partition("::")[0]):
        names = list(of_file)
        found += [names[i : i + TESTS_OF_A_PIECE] for i in range(0, len(names), TESTS_OF_A_PIECE)]
    return found


def state() -> str:
    """A digest of all that the outcome depends on: the files that git knows, or could, and the settings."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], stdout=subprocess.PIPE, check=True)
    digest = hashlib.sha256()
    for name in sorted(filter(None, listed.stdout.split(b"\0"))):
        path = Path(os.fsdecode(name))
        if path.is_file():
            digest.update(name + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    settings = {name: value for name, value in os.environ.items() if name.startswith("IRIS_") or name == "PYTHONPATH"}
    digest.update(repr((sys.executable, sorted(settings.items()))).encode())
    return digest.hexdigest()


def run(names: list[str]) -> str | None:
    """None if they pass; otherwise why not."""
    process = subprocess.Popen([sys.executable, "-m", "pytest", "-q", *names], start_new_session=True)
    try:
        status = process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"took longer than {LIMIT_S} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait()
    return None if status in (ALL_PASSED, NONE_FOUND) else f"pytest ended with {status}"


def main(arguments: list[str]) -> None:
    before, failed = state(), []
    todo = pieces(collect(arguments))
    PASSED.mkdir(exist_ok=True)
    for number, names in enumerate(todo, 1):
        text = f"piece {number} of {len(todo)}, {len(names)} tests from {names[0]}"
        note = PASSED / hashlib.sha256("\n".join([before, *names]).encode()).hexdigest()
        if note.exists():
            print(f"{text}: passed before", flush=True)
            continue
        print(text, flush=True)
        start = time.monotonic()
        if why := run(names):
            failed.append(f"{text}: {why}")
        else:
            note.write_text(f"{text}, in {time.monotonic() - start:.0f} s\n")
    if failed:
        sys.exit("\n".join([f"{len(failed)} of {len(todo)} pieces failed:", *failed]))


if __name__ == "__main__":
    main(sys.argv[1:])
