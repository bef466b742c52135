"""What a program that hangs can be asked: `ctx.heap.dump()`, and from outside `python -m iris info --pid`."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from click.testing import CliRunner
from conftest import TESTS, UNDER_TORCHRUN, import_path
from preloaded import LIMIT_S, python

import iris
from iris.__main__ import commands
from iris.world import inspection

alone = pytest.mark.skipif(UNDER_TORCHRUN, reason="starts processes of its own; run it without torchrun")


@pytest.fixture
def ctx():
    if not iris.simulator.ACTIVE and not torch.cuda.is_available():
        pytest.skip("needs a GPU, or the simulator")
    with iris.iris(1 << 20) as ctx:
        yield ctx


def test_a_dump_shows_each_tensor_and_what_flags_hold(ctx, monkeypatch):
    monkeypatch.setenv("IRIS_DEBUG", "1")
    ctx.heap._history.debug = True
    flags = ctx.zeros(2, 2, dtype=torch.int64)
    flags[1, 0] = -5
    many = ctx.zeros(100, dtype=torch.int32)
    many[7:9] = 3
    ctx.randn(8)  # dies at once
    ctx.arange(1000)[0:0]
    where = f"test_inspection.py:{test_a_dump_shows_each_tensor_and_what_flags_hold.__code__.co_firstlineno + 3}"
    if ctx.device.type == "cuda":
        torch.cuda.synchronize()  # a dump does not wait for what is still to be written
    found = ctx.heap.dump().splitlines()
    rank = ctx.get_rank()
    assert found[0].startswith(f"Heap of rank {rank} of {ctx.get_num_ranks()}, 1 MiB on {ctx.device}: 4 tensors, ")
    assert "reserved" in found[0] and "free (the largest block" in found[0]
    assert "at 0x0: int64[2, 2] made by zeros() at " in found[1] and where in found[1] and "32 bytes" in found[1]
    assert found[2].strip() == "[[0, 0], [-5, 0]]"
    assert f"at {ctx.heap.offset(many):#x}: int32[100]" in found[3] and found[4].strip() == "98 times 0, 2 times 3"
    assert "float32[8]" in found[5] and "freed here" in found[5]
    assert "int64[1000]" in found[6] and found[7].strip() == "1000 distinct values from 0 to 999"
    assert len(found) == 8


def test_any_thread_may_dump_while_others_allocate(ctx):
    dumps, over = [], threading.Event()

    def look():
        while not over.is_set():
            dumps.append(ctx.heap.dump())

    looking = threading.Thread(target=look)
    looking.start()
    for _ in range(200):
        ctx.zeros(4, dtype=torch.int32)
        ctx.heap.meet()
    over.set()
    looking.join()
    assert dumps and all(dump.startswith("Heap of rank") for dump in dumps)


HUNG = ("[[1, 1], [1, 0]]", "in worker: meet[" if iris.simulator.ACTIVE else "synchronize", "in worker: ctx.barrier()")


@pytest.fixture(scope="module")
def hung(tmp_path_factory):
    """The numbers of two processes, ranks 0 and 1, that hang: one in a barrier in a kernel, one on the host."""
    folder = tmp_path_factory.mktemp("hung")
    environment = {**os.environ, "PYTHONPATH": import_path(TESTS), "IRIS_WAIT_TIMEOUT_S": "0"}
    with subprocess.Popen([*python(), TESTS / "programs" / "hang.py", folder], env=environment) as started:
        numbers = [await_text(folder / str(rank)) for rank in range(2)]
        try:
            await_answer(numbers[0], HUNG[0], HUNG[1])
            await_answer(numbers[1], HUNG[0], HUNG[2])
            yield numbers
        finally:
            for number in numbers:
                os.kill(number, signal.SIGKILL)
            started.wait(30)


def await_text(file):
    end = time.monotonic() + LIMIT_S
    while not file.exists() and time.monotonic() < end:
        time.sleep(0.05)
    return int(file.read_text())


def await_answer(number, *texts):
    end = time.monotonic() + LIMIT_S
    while any(text not in inspection.show(inspection.ask(number)) for text in texts) and time.monotonic() < end:
        time.sleep(0.05)


def info(*arguments):
    return CliRunner().invoke(commands, ["info", *map(str, arguments)])


@alone
def test_a_process_that_hangs_says_where_it_is(hung):
    result = info("--pid", hung[0], "--pid", hung[1])
    assert result.exit_code == 0, result.output
    first, second = result.output.split("\n\n")
    assert f"Process {hung[0]}, {'in the simulator' if iris.simulator.ACTIVE else 'on a GPU'}: " in first
    for rank, text in enumerate((first, second)):
        assert f"Heap of rank {rank} of 2, 1 MiB on " in text
        assert f"int32[2, 2], 16 bytes\n      {HUNG[0]}\n" in text
        assert f"What the library has counted on rank {rank}, among ranks [0, 1]\n" in text
        assert "  flags of device_barrier() on stream 1 of 1: [3, 3]\n" in text
        assert "Thread MainThread\n" in text and "hang.py:" in text
    assert HUNG[1] in first and HUNG[2] in second


@alone
def test_the_same_for_machines(hung):
    result = info("--json", "--pid", hung[1])
    assert result.exit_code == 0, result.output
    (answer,) = json.loads(result.output)
    assert (answer["pid"], answer["simulator"], answer["complete"]) == (hung[1], iris.simulator.ACTIVE, True)
    assert [(each["kind"], each["rank"], each["ranks"]) for each in answer["memory"]] == [
        ("heap", 1, [0, 1]),
        ("library", 1, [0, 1]),
    ]
    assert [thread["name"] for thread in answer["threads"]][0] == "MainThread"


@alone
def test_who_cannot_be_asked_is_named_and_the_others_answer(hung):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        result = info("--pid", stranger.pid, "--pid", hung[0])
        stranger.communicate(b"\n")
    assert result.exit_code == 1
    assert f"Process {stranger.pid} does not listen: it has made no Iris context" in result.output
    assert "Heap of rank 0 of 2" in result.output
    assert f"There is no process {stranger.pid}" in info("--pid", stranger.pid).output


def test_only_its_own_user_asks_a_process(monkeypatch):
    monkeypatch.setattr(inspection.os, "geteuid", lambda: 12345)
    result = info("--pid", os.getpid())
    assert result.exit_code == 1 and "and only that user may ask it; this is user 12345" in result.output


@alone
def test_a_name_that_is_taken_and_a_fork_do_no_harm():
    program = """
import os, socket
from iris.world import inspection
taken = socket.socket(socket.AF_UNIX)
taken.bind(inspection._address(os.getpid()))
inspection.listen()
taken.close()
inspection._forget()
inspection.listen()
if os.fork() == 0:
    inspection.listen()
    print("child", inspection.ask(os.getpid())["pid"] == os.getpid(), flush=True)
    os._exit(0)
os.wait()
print("parent", inspection.ask(os.getpid())["pid"] == os.getpid())
"""
    environment = {**os.environ, "PYTHONPATH": import_path()}
    done = subprocess.run([*python(), "-c", program], env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout == "child True\nparent True\n", done.stderr
