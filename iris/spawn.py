"""Starts the ranks of a program on this machine, so that it runs by itself as well as under torchrun."""

import contextlib
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from multiprocessing.util import get_temp_dir
from typing import Any

from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, start_processes

from iris import simulator
from iris.arg_parser import check_callable, count
from iris.errors import InvalidCountError, WorkerNotImportableError

# How often the starting process looks up from its ranks.
INTERVAL_S = 0.1

# What a rank gets to end by itself, once the starting process is gone.
GRACE_S = 5.0


def launch(worker: Callable, num_ranks: int, *args: Any, meanwhile: Callable[[], None] | None = None) -> None:
    """Call ``worker(*args)`` once on every rank, and wait for all of them. Blocks.

    Under torchrun this process is a rank already, and simply calls it. Otherwise ``num_ranks`` processes are started
    with torchrun's environment (``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``), from which
    `iris.iris` takes rank and device. Ranks end with the process that started them, however that ends.

    Parameters
    ----------
    worker
        A function at the top level of a file (not of a notebook); it makes its own context. Its arguments must be
        picklable.
    num_ranks
        How many ranks to start. Without effect under torchrun.
    meanwhile
        Called in the starting process about ten times a second while the ranks run. Not called under torchrun.

    Raises
    ------
    WorkerNotImportableError
        ``worker`` is no function at the top level of a file, but a lambda for example, or one of a notebook.
    InvalidCountError
        ``num_ranks`` is no number of ranks, 1 or more: 0 for example, of GPUs where there are none.
    SystemExit
        A rank failed: the others are ended, and the text names the rank and holds its traceback.
    """
    check_callable("worker", worker)
    if "RANK" in os.environ:
        worker(*args)
        return
    if count(num_ranks) is None:
        raise InvalidCountError("num_ranks", num_ranks, "ranks to start")
    _check_importable(worker)
    # In the simulator ranks are copies of one process that has imported this package, which takes most of a start.
    # With GPUs the import asks for them, and a copy could not use them any more.
    method = "forkserver" if simulator.ACTIVE else "spawn"
    multiprocessing.get_context("forkserver").set_forkserver_preload(["iris"])
    # In which that process listens. It is removed when this one ends, unless a signal ends it.
    folder = get_temp_dir() if method == "forkserver" else None
    with reserved_port() as port:
        given = worker, args, dict(os.environ), num_ranks, port, folder
        with _decided():
            context = start_processes(_run, given, nprocs=num_ranks, join=False, start_method=method)
        try:
            while not context.join(INTERVAL_S):
                if meanwhile is not None:
                    meanwhile()
        except (ProcessRaisedException, ProcessExitedException) as error:
            text = error.msg.partition("following error:\n")[2] or f"{error.msg}\n"
            raise SystemExit(f"Rank {error.error_index} of {num_ranks} failed:\n{text}") from None
        finally:
            for process in context.processes:
                process.kill()
            # In which torch has a rank leave its traceback.
            for file in filter(None, context.error_files):
                with contextlib.suppress(OSError):
                    os.unlink(file)


def _check_importable(worker: Callable) -> None:
    """Ranks find the worker by its name. Where the program has no file they may find another one of that name."""
    try:
        named = pickle.dumps(worker)
    except (pickle.PicklingError, AttributeError):
        raise WorkerNotImportableError(worker) from None
    main = sys.modules["__main__"]
    has_file = main.__spec__ is not None or os.path.exists(getattr(main, "__file__", ""))
    if b"__main__" in named and not has_file:
        raise WorkerNotImportableError(worker)


@contextlib.contextmanager
def _decided() -> Iterator[None]:
    """In the simulator, the process that is copied does not decide anew that it is one, nor say so again."""
    setting = os.environ.get(simulator.VARIABLE)
    if simulator.ACTIVE:
        os.environ[simulator.VARIABLE] = "1"
    try:
        yield
    finally:
        os.environ.pop(simulator.VARIABLE, None)
        if setting is not None:
            os.environ[simulator.VARIABLE] = setting


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port on which a store can listen, and which the system gives to nobody else while the block lasts.

    A port that is only looked up can be another program's by the time that rank 0 listens there, seconds later. This
    one is bound. Nobody listens, so whoever asks for it by its number and sets SO_REUSEADDR, as torch's store does,
    gets it all the same (socket(7)).
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def _run(
    rank: int,
    worker: Callable,
    args: tuple,
    environment: dict[str, str],
    num_ranks: int,
    port: int,
    folder: str | None,
) -> None:
    starting_process = multiprocessing.parent_process()
    assert starting_process is not None
    threading.Thread(
        target=_end_with_it, args=(starting_process.sentinel, folder), name="iris-parent", daemon=True
    ).start()
    # The process that was copied may have been started before the caller changed something.
    os.environ.clear()
    os.environ.update(
        environment,
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    try:
        worker(*args)
    except Exception:
        if starting_process.is_alive():
            raise
        # Nobody would read, or remove, the file in which torch leaves it for that process.
        traceback.print_exc()
        sys.exit(1)


def _end_with_it(starting_process: int, folder: str | None) -> None:
    """End when the starting process has, however: of a rank that is left alone nobody knows, and it may wait for ever
    and hold a GPU. ``folder`` is that process's, for temporary files."""
    wait([starting_process])
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(GRACE_S)
    os._exit(1)
