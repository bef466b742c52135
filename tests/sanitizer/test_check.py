"""``python -m iris check``: exit statuses, the report, and what it runs."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import import_path
from covering import EVERYTHING, thorough
from preloaded import LIMIT_S, python

from iris import sanitizer
from iris.commands.program import command_line, members, running
from iris.errors import InvalidSettingError
from iris.sanitizer import whereabouts

pytest_plugins = ["iris.sanitizer.fixture"]

BROKEN = Path(__file__).parent / "broken"


# Both ranks race and are killed, without having met anywhere that is seen.
KILLED = """
import os, signal, sys, time
from pathlib import Path
import torch
import iris
from iris.spawn import launch
sys.path.insert(0, sys.argv[1])
from read_without_wait import exchange

def worker(folder):
    ctx = iris.iris(heap_size=1 << 20)
    rank = ctx.get_rank()
    inbox, result, flag = (ctx.zeros(64, dtype=torch.int32) for _ in range(3))
    ctx.barrier()
    exchange[(1,)](inbox, result, flag, rank, ctx.get_heap_bases(), 64, True)
    (folder / f"raced{rank}").touch()
    while not (folder / f"raced{1 - rank}").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    launch(worker, 2, Path(__file__).parent)
"""

# A comparison that there is not.
REFUSED = """
import torch, triton
import iris

@triton.jit
def receive(context_tensor, flag):
    iris.DeviceContext.initialize(context_tensor).wait(flag, 1, cmp=">=")

ctx = iris.iris(heap_size=1 << 20)
receive[(1,)](ctx.get_device_context(), ctx.ones(1, dtype=torch.int32))
"""

# What a rank does anyway: torch's compiler takes a second and 100 MB of each process that imports it.
NO_COMPILER = """
import os, sys
import torch, triton, triton.language as tl
import iris
from iris.ccl import functional
from iris.ops import functional as fused

assert "torch._dynamo" not in sys.modules, "by import iris"

@triton.jit
def kernel(context_tensor, x):
    iris.DeviceContext.initialize(context_tensor).atomic_add(x, 1, 0)

with iris.iris(heap_size=1 << 20) as ctx:
    x, out = ctx.zeros(8), torch.empty(8)
    kernel[(2,)](ctx.get_device_context(), x)
    ctx.ccl.all_reduce(out, x)
    ctx.ops.matmul_all_reduce(ctx.zeros(8, 8), torch.ones(8, 8), torch.ones(8, 8))
    ranks, ones = functional.name_of(ctx), torch.ones(8, 8, requires_grad=True)
    fused.matmul_all_reduce(ones, functional.all_reduce(ones, ranks), None, ranks).sum().backward()
    ctx.barrier()
    assert out.tolist() == [2] + 7 * [0], out
assert "torch._dynamo" not in sys.modules, "by a rank"
"""


COMMANDS = [
    pytest.param(("-m", "iris", "check"), id="checked"),
    thorough((), id="by itself"),
]


def run(*command, start=python, **variables):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("IRIS_")}
    environment |= {"PYTHONPATH": import_path(), **variables}
    command = [*start(), *map(str, command)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)


def check(*arguments, launcher=("-m", "iris"), **variables):
    return run(*launcher, "check", *arguments, **variables)


def test_a_finding():
    done = check(BROKEN / "relaxed_flag.py")
    assert done.returncode == 1, done.stderr
    first, *places = done.stdout.splitlines()
    assert first.startswith("iris-check: race/missing-release: kernel ")
    assert "'receive' of rank 1, program (0, 0, 0), reads int32[64] on rank 1, element [0] (offset 0x0 of" in first
    assert "'send' of rank 0, program (0, 0, 0), writes" in first
    assert "the flag between them, int32[1] on rank 1, element [0] (offset 0x2800 of the heap), is not written" in first
    what = ["writes, rank 0", "reads, rank 1", "writes the flag, rank 0", "reads the flag, rank 1"]
    lines = [22, 34, 24, 33]
    for place, said, line in zip(places[:-1], what, lines, strict=True):
        assert place.startswith(f"    {said}: ") and f"relaxed_flag.py:{line} in " in place


def test_nothing_found_as_json():
    done = check("--format", "json", BROKEN / "relaxed_flag.py", "--corrected")
    assert (done.returncode, json.loads(done.stdout)) == (0, []), done.stderr


def test_ranks_that_allocate_differently(iris_check):
    (finding,) = iris_check(BROKEN / "own_buffer_first.py")
    assert finding.kind == "asymmetric" and "own_buffer_first.py:" in finding.sentence
    assert [(what, finding.count) for what, _ in finding.places] == [("rank 0", 1), ("rank 1", 1)]
    assert all("own_buffer_first.py:25 in " in where for _, where in finding.places)


@pytest.mark.parametrize("text", ["raise SystemExit(7)", REFUSED], ids=["ends", "refused"])
def test_a_program_that_fails_for_another_reason(tmp_path, iris_check, text):
    program = tmp_path / "fails.py"
    program.write_text(text)
    done = check(program)
    said = "iris-check: nothing found; the program failed for another reason, reported above.\n"
    assert (done.returncode, done.stdout) == (2, said)
    with pytest.raises(subprocess.CalledProcessError):
        iris_check(program)


@pytest.mark.parametrize("command", COMMANDS)
def test_no_rank_imports_the_compiler(tmp_path, command):
    program = tmp_path / "program.py"
    program.write_text(NO_COMPILER)
    done = run(*command, program, IRIS_SIMULATOR="1")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("arguments", "status"), [([], 1), *([(["--corrected"], 0)] if EVERYTHING else [])])
def test_a_program_that_nobody_checks_from_outside_reports_when_it_ends(arguments, status):
    done = run(BROKEN / "volatile_poll.py", *arguments, IRIS_SANITIZE="1", IRIS_SIMULATOR="1")
    assert done.returncode == status, done.stderr
    assert ("iris-check: race/missing-acquire: " in done.stderr) == bool(status)


@pytest.mark.parametrize("command", COMMANDS)
def test_what_killed_ranks_have_done_is_told(tmp_path, command):
    """As are those that a launcher ends, once a race has made one of them fail."""
    program = tmp_path / "killed.py"
    program.write_text(KILLED)
    done = run(*command, program, BROKEN, TMPDIR=str(tmp_path), IRIS_SANITIZE="1", IRIS_SIMULATOR="1")
    assert done.returncode == 1, done.stderr
    printed = done.stdout if command else done.stderr
    assert "iris-check: race: " in printed and "read_without_wait.py:" in printed
    assert not list(tmp_path.glob("iris-check*")), "no notes are left behind"


# A rank, one that has left its parent, and one in a session of its own whose parent is gone, as a daemon is.
FAMILY = """
import os, subprocess, sys, time
from pathlib import Path

def sign():
    (Path(sys.argv[1]) / str(os.getpid())).touch()

if not os.fork():
    os.setsid()
    if not os.fork():
        sign()
        time.sleep(600)
    os._exit(0)
sign()
if len(sys.argv) == 2:
    subprocess.Popen([sys.executable, *sys.argv, "again"], start_new_session=True)
time.sleep(600)
"""


@pytest.mark.parametrize(("command", "number"), [
    ("check", signal.SIGTERM),
    *([("trace", signal.SIGINT), ("trace", signal.SIGTERM), ("check", signal.SIGINT), ("check", signal.SIGHUP)]
      if EVERYTHING else []),
])  # fmt: skip
def test_whoever_ends_the_command_ends_all_of_the_program(tmp_path, command, number):
    program, family, temporary = tmp_path / "family.py", tmp_path / "family", tmp_path / "temporary"
    program.write_text(FAMILY)
    family.mkdir(), temporary.mkdir()
    environment = {**os.environ, "PYTHONPATH": import_path(), "TMPDIR": str(temporary)}
    # nohup has what it starts ignore SIGHUP.
    with subprocess.Popen(
        [sys.executable, "-m", "iris", command, program, family],
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    ) as running:
        while len(list(family.iterdir())) < 4:
            assert running.poll() is None
            time.sleep(0.05)
        assert list(temporary.iterdir())
        running.send_signal(number)
        assert running.wait(LIMIT_S) == 128 + number
    for process in family.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(process.name), 0)
    assert not list(temporary.iterdir())


# Rank 0 waits for what no rank will do, and no one sees that it does; rank 1 waits for rank 0.
ENDLESS = """
import threading
import iris
from iris.spawn import launch

def wait():
    threading.Event().wait()

def worker():
    ctx = iris.iris(heap_size=1 << 20)
    if ctx.get_rank() == 0:
        wait()
    ctx.barrier()

if __name__ == "__main__":
    launch(worker, 2)
"""


def test_at_the_time_limit_every_rank_is_asked_where_it_is(tmp_path):
    program, folder = tmp_path / "endless.py", tmp_path / "notes"
    program.write_text(ENDLESS)
    folder.mkdir()
    settings = {"IRIS_SANITIZE": "1", "IRIS_SANITIZE_FOLDER": str(folder), "IRIS_SIMULATOR": "1"}
    places = [(f"rank {rank}", f"is at {program}:{line}") for rank, line in enumerate(["7 in wait", "13 in worker"])]
    with running(command_line(program, []), settings | {"PYTHONPATH": import_path()}):
        until = time.monotonic() + 100
        found = []
        while time.monotonic() < until and (not found or found[0].places != places):
            time.sleep(0.2)
            whereabouts.note(folder, members())
            found = whereabouts.findings(folder, 8)
    (finding,) = found
    assert finding.places == places
    start = "the program has not ended within 8 s (--time-limit): rank 0 is at "
    assert finding.kind == "deadlock" and finding.sentence.startswith(start)
    assert not members()


def test_a_time_limit_ends_the_program(tmp_path):
    program = tmp_path / "sleeps.py"
    program.write_text("import time; time.sleep(600)")
    done = check("--time-limit", 3, program, TMPDIR=str(tmp_path))
    said = "iris-check: deadlock: the program has not ended within 3 s (--time-limit): none of its processes uses Iris"
    assert (done.returncode, done.stdout.splitlines()) == (1, [said, "iris-check: 1 found."]), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["sleeps.py"]


@pytest.mark.thorough  # the finding is one of `test_broken`
def test_an_access_in_a_function_of_a_kernel_names_the_kernels_line_too(iris_check):
    (finding,) = iris_check(BROKEN / "stage_too_far.py")
    # The launch ends the others when a rank has failed, some before they come as far.
    assert finding.kind == "bounds" and finding.count == len(finding.ranks) > 0
    assert (
        "kernel 'pass_on' of rank " in finding.sentence
        and ", program (0, 0, 0), stops: index 2 of 2" in finding.sentence
    )
    ((_, where),) = finding.places
    assert re.search(r"stage_too_far\.py:23 in keep, called by \S+stage_too_far\.py:34 in pass_on", where)


# The signal is one that nobody gives.
POLLING = """
import time
import torch
import iris
from iris.spawn import launch

def worker():
    ctx = iris.iris(heap_size=1 << 20)
    flags = ctx.zeros(4, dtype=torch.int32)
    ctx.barrier()
    while ctx.get_rank() == 0 and flags[2].item() == 0:
        time.sleep(0.01)
    ctx.barrier()

if __name__ == "__main__":
    launch(worker, 2)
"""


@pytest.mark.thorough
def test_a_host_that_polls_what_nobody_writes_is_a_deadlock(tmp_path, iris_check):
    program = tmp_path / "polling.py"
    program.write_text(POLLING)
    (finding,) = iris_check(program)
    assert finding.kind == "deadlock"
    assert "the host of rank 0 polls what nobody will change any more (flag: rank 0's int32[4]" in finding.sentence
    assert ", element 2 (offset 0x8)); the host of rank 1 waits in a barrier" in finding.sentence
    assert finding.places == [(f"waits, rank {r}", f"{program}:{11 + 2 * r} in worker") for r in range(2)]


@pytest.mark.thorough
@pytest.mark.parametrize("by", ["torchrun", thorough("another launcher")])
def test_a_rank_runs_a_program_of_its_own(tmp_path, by):
    """Not as the rank that it is: the others of its world would not come."""
    program = tmp_path / "program.py"
    program.write_text("import iris\nassert iris.iris(heap_size=1 << 20).get_num_ranks() == 1")
    rank = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    command = ["-m", "iris", "check", program]
    if by == "torchrun":
        rank["TORCHELASTIC_RUN_ID"] = "some"
        command = ["-c", "import subprocess, sys; sys.exit(subprocess.call([sys.executable, *sys.argv[1:]]))", *command]
    done = run(*command, start=lambda: [sys.executable], **rank)  # which looks at its parent
    assert (done.returncode, done.stdout) == (0, "iris-check: nothing found.\n"), done.stderr
    assert "The environment is that of rank 1" in done.stderr


def test_schedules_stop_at_the_first_that_fails():
    done = check("--seed", 5, "--schedules", 2, BROKEN / "all_reduce_in_place.py")
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[-1] == "iris-check: 1 found with --seed 5."


@pytest.mark.thorough
def test_schedules_in_which_nothing_is_found():
    done = check("--seed", 5, "--schedules", 2, BROKEN / "all_reduce_in_place.py", "--corrected")
    assert (done.returncode, done.stdout) == (0, "iris-check: nothing found with --seed 5 to 6.\n"), done.stderr


# Each rank writes to the next one while that reads, and says how many they are.
OF_NO_RANKS = """
import sys
import iris
ctx = iris.iris(heap_size=1 << 20)
mine = ctx.zeros(4)
ctx.barrier()
ctx.peer(mine, (ctx.get_rank() + 1) % ctx.get_num_ranks()).fill_(1 + ctx.get_rank())
assert sys.argv[1:] == ["--num-ranks", "9"] and ctx.get_num_ranks() == 3 and mine.sum() >= 0
"""


def test_ranks_that_the_command_starts(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(OF_NO_RANKS)
    done = check("--num-ranks", 3, program, "--num-ranks", 9)
    assert done.returncode == 1, done.stderr
    assert "iris-check: race: " in done.stdout and "AssertionError" not in done.stderr


def test_under_torchrun():
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "iris")
    done = check(BROKEN / "gpu_scope_signal.py", launcher=launcher)
    assert done.returncode == 1
    assert "iris-check: race/scope: " in done.stdout + done.stderr


def test_a_setting_that_means_nothing(monkeypatch):
    monkeypatch.setenv("IRIS_SANITIZE", "yes")
    with pytest.raises(InvalidSettingError, match="IRIS_SANITIZE='yes'.*1 for on, 0 for off"):
        sanitizer.start_if_wanted(None)
