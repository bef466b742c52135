"""Ranks end on the way: the others are told at once which, and how, and nothing is left of them."""

import contextlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import dying
import pytest
import torch.distributed as dist
from conftest import TESTS, UNDER_TORCHRUN, import_path
from covering import EVERYTHING, sample, thorough
from preloaded import python

import iris
from iris.errors import GroupAbortedError, MismatchedSettingsError, PeerLostError
from iris.spawn import launch, reserved_port

pytestmark = pytest.mark.skipif(UNDER_TORCHRUN or not iris.simulator.ACTIVE, reason="starts simulated ranks of its own")

RANKS = 2
# For being told, and for the whole of a program: three seconds and twenty are enough, and five and ten times as long on
# a machine that is busy. No time-out of torch is as short.
TOLD_S, OVER_S = 15.0, 200.0
SAID = {
    "killed": "was killed by SIGKILL",
    "segfault": "was killed by SIGSEGV",
    "os._exit": "the program has ended there",
    "exception": "ValueError: the end of this rank",
    "sys.exit": "the program has ended there",
}

# In the sample each value comes up once; ranks of torchrun take seconds to start.
CASES = [dying.HOWS, dying.WHERES, ("plain", "spawn"), ("0", "1")]
CASES = sample(*CASES, together=len(CASES) if EVERYTHING else 1)
CASES += sample(dying.HOWS, dying.WHERES, ["torchrun"], ("0", "1"), together=4) if EVERYTHING else [
    ("killed", "barrier", "torchrun", "1")
]  # fmt: skip


def run_rank(rank, ranks, port, environment, worker, arguments):
    os.environ.update(
        environment, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )  # fmt: skip
    worker(*arguments)


@contextlib.contextmanager
def running(worker, *arguments, environments=({}, {})):
    """Ranks that nobody looks after."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["iris"])
    with reserved_port() as port:
        processes = [
            context.Process(target=run_rank, args=(rank, len(environments), port, environment, worker, arguments))
            for rank, environment in enumerate(environments)
        ]
        try:
            for process in processes:
                process.start()
            yield processes
        finally:
            for process in processes:
                process.kill()


def ends(processes):
    """Their exit codes, once all have ended by themselves."""
    for process in processes:
        process.join(OVER_S)
        assert not process.is_alive(), "a rank did not end"
    return [process.exitcode for process in processes]


def plain(how, where, victims, folder, ranks=RANKS):
    temporary = folder / "temporary"
    temporary.mkdir()
    environments = [{"TMPDIR": str(temporary)}] * ranks
    with running(dying.main, how, where, victims, folder, environments=environments) as processes:
        codes = ends(processes)
    dead = [int(victim) for victim in victims.split(",")]
    # A rank is known from its first meeting on. With rank 0 ends the store, in which it leaves word of its error: who
    # comes later than that knows its exit status.
    said = [SAID[how]] + ["has ended with exit status 1"] * (how == "exception" and 0 in dead)
    for rank in set(range(ranks)) - set(dead):
        assert codes[rank] == 1
        report = json.loads((folder / str(rank)).read_text())
        assert report["error"].startswith("PeerLostError: "), report
        assert any(f"rank {victim}" in report["error"] for victim in dead), report
        assert where == "init" or any(text in report["error"] for text in said), report
        assert report["after_s"] < TOLD_S, report
        assert report["held"] == 0, "memory that is shared with the dead"
    assert list(temporary.iterdir()) == []


def spawn(how, where, victim, folder):
    with pytest.raises(SystemExit, match=rf"[Rr]ank {victim}\b") as caught:
        launch(dying.main, RANKS, how, where, victim, folder)
    failed = 1 - int(victim) if how in ("os._exit", "sys.exit") else victim
    assert str(caught.value).startswith(f"Rank {failed} of {RANKS} failed")
    assert time.time() - float((folder / "end").read_text()) < OVER_S
    assert multiprocessing.active_children() == []


def torchrun(how, where, victim, folder):
    command = [*python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += [str(RANKS), TESTS / "dying.py", how, where, victim, folder]
    environment = {**os.environ, "PYTHONPATH": import_path(TESTS), "IRIS_SIMULATOR": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=OVER_S)
    assert done.returncode != 0
    # Its own summary names who failed first; where that one has ended well, the other one says it.
    assert f"rank      : {victim} " in done.stderr or f"rank {victim} " in done.stderr, done.stderr


@pytest.mark.parametrize(("how", "where", "launcher", "victim"), CASES)
def test_the_others_are_told(how, where, launcher, victim, tmp_path):
    {"plain": plain, "spawn": spawn, "torchrun": torchrun}[launcher](how, where, victim, tmp_path)


# Of four ranks one in the middle, or two at once, of which one has the store.
OF_FOUR = [dying.WHERES + dying.MORE_WHERES + dying.WHERES_OF_BACKEND, ("2", "0,3")]
OF_FOUR = sample(*OF_FOUR) if EVERYTHING else [("making of a group", "0,3")]


@pytest.mark.parametrize(("where", "victims"), OF_FOUR)
def test_all_others_are_told(where, victims, tmp_path):
    plain("killed", where, victims, tmp_path, ranks=4)


@pytest.mark.parametrize(
    "where", ["kernel", *(["barrier", "set-up", "device barrier", "collective"] if EVERYTHING else [])]
)
def test_the_ranks_of_another_host_are_told(where, tmp_path):
    """Of two hosts with two ranks each one is killed. Who finds it first breaks the group, and may be faster."""
    environments = [{"IRIS_HOST": f"host{rank // 2}"} for rank in range(4)]
    with running(dying.main, "killed", where, "2,3", tmp_path, environments=environments) as processes:
        assert ends(processes)[:2] == [1, 1]
    for rank in range(2):
        report = json.loads((tmp_path / str(rank)).read_text())
        assert re.search(r"PeerLostError: .*rank [23].* was killed by SIGKILL", report["error"]), report
        assert where not in ("collective", "device barrier") or "is on host1" in report["error"], report
        assert report["after_s"] < TOLD_S and report["held"] == 0, report


def meet(folder, how):
    """Rank 1 stops before a barrier; rank 0 waits there, and gets a signal."""
    ctx = iris.iris(1 << 20)
    ctx.barrier()
    if ctx.cur_rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(7))
    (folder / f"waits{ctx.cur_rank}").touch()
    try:
        ctx.barrier()
    except (KeyboardInterrupt, SystemExit) as error:
        (folder / "interrupted").write_text(type(error).__name__)
        raise
    except (PeerLostError, GroupAbortedError):
        assert how != "nothing"


@pytest.mark.parametrize(
    ("how", "interrupt"),
    [thorough("nothing", ""), ("SIGINT", "KeyboardInterrupt"), thorough("SIGTERM", "SystemExit")],
)
def test_a_stopped_rank_is_waited_for_and_a_signal_ends_the_wait(how, interrupt, tmp_path):
    with running(meet, tmp_path, how) as processes:
        deadline = time.monotonic() + OVER_S
        while not (tmp_path / "waits0").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(1.5)
        assert all(process.is_alive() for process in processes)
        if interrupt:
            os.kill(processes[0].pid, getattr(signal, how))
            processes[0].join(TOLD_S)
            assert processes[0].exitcode in (1, 7)
            assert (tmp_path / "interrupted").read_text() == interrupt
        os.kill(processes[1].pid, signal.SIGCONT)
        codes = ends(processes)
    assert codes[1] == 0 and (codes[0] == 0) == (not interrupt)


def differ(folder):
    try:
        iris.iris(1 << 20)
    except MismatchedSettingsError as error:
        (folder / os.environ["RANK"]).write_text(str(error))


@pytest.mark.parametrize("variable", ["IRIS_DEBUG", "IRIS_TRACE", "IRIS_SANITIZE"])
def test_settings_that_differ_are_named_on_all_ranks(variable, tmp_path):
    with running(differ, tmp_path, environments=({variable: "0"}, {variable: "1"})) as ranks:
        ends(ranks)
    for rank in range(RANKS):
        message = (tmp_path / str(rank)).read_text()
        assert message.startswith(f"The ranks differ in {variable}: 0 on rank 0; 1 on rank 1.")


def keep_group(folder):
    """Groups come and go, and with them their connections."""
    with iris.iris(1 << 20) as ctx:

        def use():
            group = dist.new_group()
            ctx.barrier(group=group)
            ctx._groups.pop(group)
            dist.destroy_process_group(group)
            return len(os.listdir("/proc/self/fd"))

        # The other end of a connection closes it a moment later, so that a single count says little.
        counts = [use() for _ in range(24)]
        assert min(counts[18:]) <= min(counts[2:8]) + 4, counts


def test_a_group_that_is_gone_keeps_no_connection():
    with running(keep_group, Path()) as ranks:
        assert ends(ranks) == [0, 0]


def come_late(port):
    """With a backend that does not connect the ranks, as NCCL, to a store that waits for nobody, as torchrun's."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 (registers the backend "fake")

    rank = int(os.environ["RANK"])
    os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    time.sleep(1.5 * rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("fake", store=store, rank=rank, world_size=RANKS)
    with iris.iris(1 << 20) as ctx:
        ctx.barrier()


def test_a_rank_that_comes_late_is_not_dead():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with running(come_late, server.port) as ranks:
        assert ends(ranks) == [0, 0]


def end_unknown(how):
    """What torchrun says to the ranks is in their environments, as the system lists these; copies show theirs there."""
    command = [*python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command += [TESTS / "programs" / "end_unknown.py", how]
    environment = {**os.environ, "PYTHONPATH": import_path(TESTS), "IRIS_SIMULATOR": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=OVER_S)


def test_a_rank_of_torchrun_that_ends_well_before_it_is_known_is_missed():
    done = end_unknown("end")
    assert done.returncode != 0
    assert re.search(r"PeerLostError: Rank 0 waits in .*, and rank 1 will not come: its process has ended", done.stderr)


@pytest.mark.thorough
def test_a_rank_of_torchrun_that_comes_late_is_waited_for():
    done = end_unknown("late")
    assert done.returncode == 0, done.stderr
