"""Compares the instructions of every kernel with those that are stored, for GPUs that need not be there.

    python scripts/digests.py                                  # all targets, the oldest and the newest Triton
    python scripts/digests.py --triton newest --target sm_90 --only "ccl.*push"
    python scripts/digests.py --write                          # stores what is there now

A digest is of what a GPU sees: names, lines and comments do not count (tests/codegen/digest.py). A change of the code
that keeps all digests needs no new run on GPUs; any other says which kernels changed, and why. The kernels and their
arguments are those of the compile checks (tests/codegen/cases.py); ``tests/codegen/digests`` has a file for each
version of Triton and target. All of it takes an hour and more. Interrupted, it goes on where it was, unless a source
has changed. It exits with 1 if a kernel is changed, renamed or gone, or does not compile; new ones are listed.

One in some hundred times LLVM gives a kernel for AMD other registers, though nothing has changed. So what differs is
compiled once more, in another process, and has not changed if that gives the stored digest.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STORED = ROOT / "tests" / "codegen" / "digests"
PROGRESS = ROOT / "out" / "digests"
# What PYTHONPATH is for each.
TRITONS = {"oldest": str(ROOT / ".oldest"), "newest": ""}
TARGETS = ["sm_90", "sm_100", "gfx942", "gfx950"]
# What all ranks share in the environment, and what changes kernels.
SETTINGS = [{}, {"IRIS_WAIT_TIMEOUT_S": "2.5"}, {"IRIS_DEBUG": "1"}]
PROCESSES = 2
# Instead of a digest.
FAILED, ELSEWHERE = "does not compile: ", "only "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triton", choices=TRITONS, action="append", help="default: both")
    parser.add_argument("--target", choices=TARGETS, action="append", help="default: all")
    parser.add_argument("--only", default="", help="a regular expression, found in the names of the kernels to look at")
    parser.add_argument("--write", action="store_true", help="store the digests")
    parser.add_argument("--keep", type=Path, help="a folder for the instructions of each kernel, to compare by diff")
    # Of the processes that compile.
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--setting", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--progress", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.target = args.target or TARGETS
    if args.progress:
        compile_part(args)
        return
    current = PROGRESS / fingerprint()
    for other in PROGRESS.glob("*"):
        if other != current:
            shutil.rmtree(other)
    bad = False
    for triton in args.triton or TRITONS:
        version = version_of(triton)
        compile_all(triton, current / version, args.target, args.only, args.keep)
        for target in args.target:
            file, found = STORED / f"{version}-{target}.json", results(current / version, target)
            stored = read(file)
            changed = [name for name, value in stored.items() if found.get(name, value) != value]
            if changed:
                only = "|".join(f"^{re.escape(name)}$" for name in changed)
                compile_all(triton, current / version / "again", [target], only, args.keep)
                again = results(current / version / "again", target)
                found |= {name: value for name, value in again.items() if value == stored.get(name)}
            bad |= report(file, found, args.only, args.write)
    sys.exit(bad)


def fingerprint() -> str:
    """Of all sources that a kernel or its arguments may come from."""
    files = [file for folder in ("iris", "examples", "benchmarks", "tests") for file in (ROOT / folder).rglob("*.py")]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in sorted(files))).hexdigest()[:16]


def environment(triton: str) -> dict[str, str]:
    """Without settings of Iris, Triton and LLVM that might change kernels; and with all cases, not a sample of them."""
    given = {key: value for key, value in os.environ.items() if not re.match("IRIS_|TRITON_|MLIR_|LLVM_", key)}
    return given | {"IRIS_SIMULATOR": "0", "IRIS_TEST_ALL": "1", "PYTHONPATH": TRITONS[triton]}


def version_of(triton: str) -> str:
    command = [sys.executable, "-c", "import triton; print(triton.__version__)"]
    return subprocess.run(
        command, env=environment(triton), stdout=subprocess.PIPE, text=True, check=True
    ).stdout.strip()


def compile_all(triton: str, progress: Path, targets: list[str], only: str, keep: Path | None) -> None:
    progress.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, "--progress", str(progress), "--only", only]
    command += [word for target in targets for word in ("--target", target)] + (["--keep", str(keep)] if keep else [])
    for setting in SETTINGS:
        processes = [
            subprocess.Popen(
                [*command, "--setting", json.dumps(setting), "--part", str(part)], env=environment(triton) | setting
            )
            for part in range(PROCESSES)
        ]
        if any([process.wait() for process in processes]):
            sys.exit(f"A compiler has ended its process, at the kernel after the last line of a file in {progress}.")


def compile_part(args: argparse.Namespace) -> None:
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from codegen.cases import cases

    done = {(target, name) for target, name, _ in finished(args.progress)}
    with open(args.progress / f"{args.part}.jsonl", "a") as file:
        file.write("\n")  # ends a line that was interrupted
        for target in args.target:
            for number, case in enumerate(cases(target, args.setting)):
                if number % PROCESSES != args.part or not re.search(args.only, case.name):
                    continue
                if args.keep or (target, case.name) not in done:
                    print(json.dumps([target, case.name, digest_of(target, case, args.keep)]), file=file, flush=True)


def digest_of(target: str, case, keep: Path | None) -> str:
    """The digest of a case of tests/codegen/cases.py, or what there is instead."""
    from codegen.digest import digest, instructions
    from codegen.offline import assembly_for

    if target not in case.targets:
        return ELSEWHERE + " and ".join(case.targets)
    try:
        text = assembly_for(target, case.kernel, *case.arguments, **case.options)
    except Exception as error:
        while error.__cause__:
            error = error.__cause__
        return FAILED + str(error).strip().split("\n")[-1]
    if keep:
        file = keep / target / f"{case.name.replace('/', '|')}.s"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(instructions(text)))
    return digest(text)


def finished(progress: Path) -> list[list[str]]:
    """Target, name and digest of all that was compiled; a line that was interrupted is none."""
    lines = [line for file in sorted(progress.glob("*.jsonl")) for line in file.read_text().splitlines(keepends=True)]
    return [json.loads(line) for line in lines if line.endswith("]\n")]


def results(progress: Path, target: str) -> dict[str, str]:
    """What `finished` has of a target, by the kernels' names."""
    return {name: value for at, name, value in finished(progress) if at == target}


def read(file: Path) -> dict[str, str]:
    return json.loads(file.read_text()) if file.exists() else {}


def report(file: Path, found: dict[str, str], only: str, write: bool) -> bool:
    """Prints how what was found differs from what the file has, and stores it if asked. Whether that is a failure."""
    stored = read(file)
    found = {name: value for name, value in found.items() if re.search(only, name)}
    other = {name: value for name, value in stored.items() if not re.search(only, name)}
    lists = differences({name: value for name, value in stored.items() if name not in other}, found)
    print(f"{file.stem}: {len(found)} kernels, {', '.join(f'{len(each)} {what}' for what, each in lists.items())}")
    for what, each in lists.items():
        for line in each:
            print(f"  {what}: {line}")
    if write:
        file.parent.mkdir(exist_ok=True)
        good = {name: value for name, value in found.items() if not value.startswith(FAILED)}
        file.write_text(json.dumps(other | good, indent=0, sort_keys=True) + "\n")
    sys.stdout.flush()
    return any(each for what, each in lists.items() if what == "failed" or what != "new" and not write)


def differences(stored: dict[str, str], found: dict[str, str]) -> dict[str, list[str]]:
    """Which kernels are changed, renamed (the same instructions by another name), new and gone, and which failed."""
    failed = {name: value for name, value in found.items() if value.startswith(FAILED)}
    new = {name: value for name, value in found.items() if name not in stored and name not in failed}
    gone = {name: value for name, value in stored.items() if name not in found}
    renamed = {}
    for before, value in sorted(gone.items()):
        after = min((name for name in new if new[name] == value and name not in renamed.values()), default=None)
        if after and not value.startswith(ELSEWHERE):
            renamed[before] = after
    return {
        "changed": sorted(name for name in found.keys() & stored.keys() - failed.keys() if found[name] != stored[name]),
        "renamed": [f"{before} -> {after}" for before, after in renamed.items()],
        "new": sorted(new.keys() - renamed.values()),
        "gone": sorted(gone.keys() - renamed.keys()),
        "failed": [f"{name} {value}" for name, value in sorted(failed.items())],
    }


if __name__ == "__main__":
    main()
