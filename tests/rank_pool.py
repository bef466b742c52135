"""Runs a test's function on every rank: `RankPool` in processes of its own, `Torchrun` in the processes that are there.

The function is ``worker(ctx, *args)`` at the top level of a test module; ``ctx`` is an Iris context that all workers of
the pool share, so every test also runs on a heap that others have used.
"""

import contextlib
import gc
import importlib
import multiprocessing
import os
import pickle
import random
import sys
import tempfile
import traceback
from datetime import timedelta
from multiprocessing import forkserver, spawn
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple
from unittest import mock

# Before numpy and torch are loaded, here and in the processes that are started: threads that share cores with those of
# other ranks wait for each other, and a small product takes many times as long.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import modules_of_ranks
import pytest
import torch
import torch.distributed as dist
from covering import EVERYTHING
from preloaded import python

HEAP_SIZE = 1 << 26


class Hosts(NamedTuple):
    """Ranks on several hosts, by ``IRIS_HOST``: one host after the other, or ``dealt`` out."""

    hosts: int
    ranks_each: int
    dealt: bool = False

    def __str__(self) -> str:
        return f"{self.hosts}x{self.ranks_each}{'dealt' * self.dealt}"

    @classmethod
    def parse(cls, text: str) -> "Hosts":
        """Of what `str` makes of it: "2x1", or "2x2dealt"."""
        hosts, _, ranks_each = text.removesuffix("dealt").partition("x")
        return cls(int(hosts), int(ranks_each), text.endswith("dealt"))

    @property
    def num_ranks(self) -> int:
        return self.hosts * self.ranks_each

    def host_of(self, rank: int) -> int:
        return rank % self.hosts if self.dealt else rank // self.ranks_each

    def ranks_of(self, host: int) -> list[int]:
        return [rank for rank in range(self.num_ranks) if self.host_of(rank) == host]


# On which tests of several hosts run. The sample has ranks in another order, other numbers of hosts than of ranks on
# each, and hosts of one rank.
HOSTS = (Hosts(2, 2, dealt=True), Hosts(3, 2), Hosts(4, 1))
HOSTS += (Hosts(2, 2), Hosts(2, 3), Hosts(2, 4)) if EVERYTHING else ()
# For tests of what is the same code on any of these, but for the order of ranks.
FEWER_HOSTS = HOSTS if EVERYTHING else HOSTS[:1]

# Of tests in which hosts do not make the same calls: by NCCL they compare none, and wait until it ends the process.
needs_gloo = pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL would end the process")


def hosts_of_torchrun() -> Hosts | None:
    """The hosts that torchrun's ranks are to count as, by ``IRIS_TEST_HOSTS``; None where they are one."""
    text = os.environ.get("IRIS_TEST_HOSTS")
    return Hosts.parse(text) if text else None


def make_rails_late(rank: int) -> None:
    """``IRIS_TEST_LATE_RAILS=seed``: the rails of the simulator are late by chance, which this number seeds."""
    seed = os.environ.get("IRIS_TEST_LATE_RAILS")
    if seed:
        from iris.world import late_rails

        late_rails.chance = random.Random(f"{seed} of rank {rank}")


START_LIMIT_S = 600
RUN_LIMIT_S = 900  # eight ranks may share two busy cores
GRACE_S = 3  # what the other ranks get to finish, once one has failed


class RankFailure(AssertionError):
    """A worker raised, hung or died on some rank."""


def _serve(pipe, rank, num_ranks, port, host):
    """One rank's process: takes (module, function, args, import path) and answers (ok, result or traceback)."""
    gc.freeze()  # a collection, of which some tests ask for many, would go through all of torch's modules each time
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
    if host is not None:
        os.environ["IRIS_HOST"] = host
    os.environ.pop("IRIS_SANITIZE", None)  # what is noted down, and for how long, each test says
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=START_LIMIT_S))
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=START_LIMIT_S)
    )
    import iris
    from iris import sanitizer

    make_rails_late(rank)
    ctx = iris.iris(HEAP_SIZE)
    pipe.send((True, None))
    while True:
        try:
            module, function, args, path, notes = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            sys.path[:] = path
            worker = getattr(importlib.import_module(module), function)
            with sanitizer.recording(notes, rank, num_ranks) if notes else contextlib.nullcontext():
                answer = (True, worker(ctx, *args))
                ctx.barrier()
        except BaseException:
            answer = (False, traceback.format_exc())
        try:
            pipe.send(answer)
        except Exception:
            pipe.send((False, traceback.format_exc()))


class RankPool:
    """``num_ranks`` processes, started once; replaced when one fails, since the others may be waiting for it.

    In the place of a number of ranks `Hosts` may stand.
    """

    def __init__(self, ranks: int | Hosts) -> None:
        self.hosts = ranks if isinstance(ranks, Hosts) else None
        self.num_ranks = ranks.num_ranks if isinstance(ranks, Hosts) else ranks
        self._processes, self._pipes = [], []

    def run(self, worker, *args) -> list:
        """The results of ``worker(ctx, *args)``, a rank each. With ``IRIS_SANITIZE=1`` nothing must be wrong in it."""
        if os.environ.get("IRIS_SANITIZE") != "1":
            return self._run(worker, args, None)
        results, findings = self.run_sanitized(worker, *args)
        if findings:
            raise AssertionError("\n".join(map(str, findings)))
        return results

    def run_sanitized(self, worker, *args) -> tuple[list, list]:
        """The results, and what the sanitizer finds wrong."""
        from iris.sanitizer.analysis import analyse

        with tempfile.TemporaryDirectory() as notes:
            results = self._run(worker, args, Path(notes))
            return results, analyse(Path(notes))

    def _run(self, worker, args, notes: Path | None) -> list:
        if not self._processes:
            self._start()
        message = pickle.dumps((worker.__module__, worker.__name__, args, sys.path, notes))
        for pipe in self._pipes:
            pipe.send_bytes(message)
        return self._collect(RUN_LIMIT_S)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._pipes = [], []

    @staticmethod
    def start_server() -> None:
        """Let there be the process from which ranks are forked: one in all, which has what was imported when it began.

        So it has to be before a test lets `multiprocessing` start one, of which each rank would import everything.
        """
        context = multiprocessing.get_context("forkserver")
        # What each rank would else import for itself; the second is for torch.testing, the last for modules of tests.
        context.set_forkserver_preload(["iris", "torch.distributed.tensor", "pytest", "tests.modules_of_ranks"])
        program = os.fsencode(python()[0])
        with modules_of_ranks.handed_over(), mock.patch.object(spawn, "get_executable", lambda: program):
            forkserver.ensure_running()

    def _start(self) -> None:
        self.start_server()  # if it has been ended
        context = multiprocessing.get_context("forkserver")
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.num_ranks):
            pipe, child = context.Pipe()
            host = self.hosts and f"host{self.hosts.host_of(rank)}"
            args = (child, rank, self.num_ranks, self._store.port, host)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            child.close()
            self._processes.append(process)
            self._pipes.append(pipe)
        self._collect(START_LIMIT_S)

    def _collect(self, limit: float) -> list:
        results, failures = {}, {}
        while len(results) + len(failures) < self.num_ranks:
            waiting = [p for rank, p in enumerate(self._pipes) if rank not in results and rank not in failures]
            ready = wait(waiting, GRACE_S if failures else limit)
            if not ready:
                for rank, pipe in enumerate(self._pipes):
                    if pipe in waiting:
                        failures[rank] = "did not finish"
            for pipe in ready:
                rank = self._pipes.index(pipe)
                try:
                    ok, value = pipe.recv()
                except (EOFError, ConnectionError):
                    ok, value = False, "died"
                (results if ok else failures)[rank] = value
        if failures:
            self.close()
            raise RankFailure("\n".join(f"--- rank {rank}: {text}" for rank, text in sorted(failures.items())))
        return [results[rank] for rank in range(self.num_ranks)]


class Torchrun:
    """The ranks that torchrun started: every one of them runs the same tests, in step."""

    @staticmethod
    def join() -> None:
        """Before any test, since one that takes no ranks may make a context, which would join with other settings."""
        hosts, rank = hosts_of_torchrun(), int(os.environ["RANK"])
        if hosts is not None:
            if hosts.num_ranks != int(os.environ["WORLD_SIZE"]):
                raise ValueError(f"IRIS_TEST_HOSTS={hosts} is for {hosts.num_ranks} ranks.")
            # NCCL takes the ranks for those of several machines, too, between which there is a network of their own.
            host = f"host{hosts.host_of(rank)}"
            os.environ.update(IRIS_HOST=host, NCCL_HOSTID=host, NCCL_NET="Socket", NCCL_SOCKET_IFNAME="lo")
        gpus = torch.cuda.device_count()
        if gpus:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % gpus)
        # More ranks than GPUs take turns on them (docs/platforms.md). NCCL wants a GPU for each.
        own_gpus = int(os.environ["LOCAL_WORLD_SIZE"]) <= gpus
        dist.init_process_group("cpu:gloo,cuda:nccl" if own_gpus else "gloo", timeout=timedelta(seconds=40))

    def __init__(self) -> None:
        import iris

        make_rails_late(int(os.environ["RANK"]))
        self._ctx = iris.iris(HEAP_SIZE)
        self.num_ranks = self._ctx.get_num_ranks()
        self.hosts = hosts_of_torchrun()

    def close(self) -> None:
        dist.destroy_process_group()

    def run(self, worker, *args) -> list:
        # Rank 0's arguments, as in a pool: a temporary folder, say, is another one in each process.
        args = self._ctx.broadcast(args)
        try:
            answer = (True, worker(self._ctx, *args))
        except BaseException:
            answer = (False, traceback.format_exc())
        answers = [None] * self.num_ranks
        try:
            dist.all_gather_object(answers, answer)
        except RuntimeError:
            # The others wait for one that failed: what it has to say is why.
            if answer[0]:
                raise
            answers[dist.get_rank()] = answer
        failures = [f"--- rank {rank}: {answer[1]}" for rank, answer in enumerate(answers) if answer and not answer[0]]
        if failures:
            raise RankFailure("\n".join(failures))
        self._ctx.barrier()
        return [value for _, value in answers]
