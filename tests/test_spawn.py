"""`iris.spawn.launch`: ranks know who they are, and the failure of one is the failure of the program."""

import os
import signal
import socket
import subprocess
import tempfile
import time

import pytest
import torch
import torch.distributed as dist
from conftest import TESTS, UNDER_TORCHRUN, import_path
from covering import EVERYTHING
from preloaded import LIMIT_S, python

from iris.errors import InvalidCountError, WorkerNotImportableError
from iris.spawn import launch, reserved_port

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")


def write_environment(folder):
    text = " ".join(os.environ[name] for name in VARIABLES)
    (folder / os.environ["RANK"]).write_text(text)


def write_environment_when_asked(folder):
    while not (folder / "asked").exists():
        time.sleep(0.01)
    write_environment(folder)


def fail_on_rank_1(how):
    if os.environ["RANK"] == "0":
        time.sleep(600)
    if how == "raises":
        raise ValueError("of all ranks, me")
    os._exit(3)


@pytest.mark.skipif(UNDER_TORCHRUN, reason="the ranks are there already")
def test_ranks_get_the_environment_of_torchrun(tmp_path):
    launch(write_environment_when_asked, 2, tmp_path, meanwhile=(tmp_path / "asked").touch)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["0 0 2 127.0.0.1", "1 1 2 127.0.0.1"]


def test_a_rank_of_torchrun_simply_runs(tmp_path, monkeypatch):
    for name, value in zip(VARIABLES, ("5", "1", "8", "somewhere"), strict=True):
        monkeypatch.setenv(name, value)
    launch(write_environment, 2, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["5"]


@pytest.mark.skipif(UNDER_TORCHRUN, reason="the ranks are there already")
@pytest.mark.parametrize(("how", "message"), [("raises", "ValueError: of all ranks, me"), ("dies", "exit code 3")])
def test_a_rank_that_fails_ends_the_others_and_is_named(tmp_path, monkeypatch, how, message):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(SystemExit) as caught:
        launch(fail_on_rank_1, 2, how)
    assert not list(tmp_path.glob("pytorch-errorfile*"))
    assert str(caught.value.code).startswith("Rank 1 of 2 failed:")
    assert message in caught.value.code


@pytest.mark.skipif(UNDER_TORCHRUN, reason="the ranks are there already")
@pytest.mark.parametrize("num_ranks", [0, -1, 2.0])
def test_a_program_without_ranks_does_not_seem_to_have_succeeded(tmp_path, num_ranks):
    with pytest.raises(InvalidCountError, match=f"num_ranks={num_ranks} is not possible"):
        launch(write_environment, num_ranks, tmp_path)


@pytest.mark.skipif(UNDER_TORCHRUN, reason="the ranks are there already")
def test_a_worker_that_ranks_cannot_find_by_its_name_is_refused():
    with pytest.raises(WorkerNotImportableError, match="cannot import <function .*<lambda>"):
        launch(lambda: None, 2)


PROGRAM = "from iris.spawn import launch\ndef main(): print('done')\nlaunch(main, 2)"


@pytest.mark.skipif(UNDER_TORCHRUN, reason="the ranks are there already")
@pytest.mark.parametrize("arguments", [["-c", PROGRAM], ["-"]], ids=["-c", "standard input"])
def test_a_program_without_a_file_starts_no_ranks_and_says_why(arguments):
    command = [*python(), *arguments]
    environment = {**os.environ, "PYTHONPATH": import_path()}
    done = subprocess.run(command, input=PROGRAM, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert "WorkerNotImportableError: Ranks are new processes" in done.stderr


@pytest.mark.skipif(UNDER_TORCHRUN or torch.cuda.is_available(), reason="the simulator does not switch itself on")
def test_a_program_says_once_that_its_ranks_are_simulated():
    source = "import os, test_spawn; test_spawn.launch(os.getpid, 2); assert 'IRIS_SIMULATOR' not in os.environ"
    environment = {**os.environ, "PYTHONPATH": import_path(TESTS)}
    environment.pop("IRIS_SIMULATOR", None)
    command = [*python(), "-c", source]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=LIMIT_S)
    assert done.stderr.count("kernels run in the simulator") == 1


@pytest.mark.parametrize("host", ["127.0.0.1", ""], ids=["this address", "any address"])
def test_the_port_of_the_ranks_is_theirs_until_a_store_listens_there(host):
    with reserved_port() as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((host, port))
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        store.set("key", "value")
        assert dist.TCPStore("127.0.0.1", port).get("key") == b"value"


def sleep(folder):
    (folder / os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(600)


STARTS = "import pathlib, sys, test_spawn; test_spawn.launch(test_spawn.sleep, 2, pathlib.Path(sys.argv[1]))"


def is_alive(number):
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.skipif(UNDER_TORCHRUN, reason="the ranks are there already")
@pytest.mark.parametrize("number", [signal.SIGKILL, *([signal.SIGTERM, signal.SIGINT] if EVERYTHING else [])])
def test_ranks_end_with_whoever_started_them_and_nothing_is_left(tmp_path, number):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "PYTHONPATH": import_path(TESTS), "TMPDIR": str(temporary)}
    command = [*python(), "-c", STARTS, tmp_path]
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as started:
        while not all((tmp_path / str(rank)).exists() and (tmp_path / str(rank)).read_text() for rank in range(2)):
            assert started.poll() is None
            time.sleep(0.05)
        ranks = [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
        assert all(map(is_alive, ranks))
        started.send_signal(number)
    end = time.monotonic() + LIMIT_S
    while any(map(is_alive, ranks)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(is_alive, ranks))
    assert list(temporary.iterdir()) == []
