"""A user's program that a command runs (`check`, `trace`), and of which it leaves no process behind, however it ends.

A program may start ranks, and these other processes, in sessions of their own and with parents that are gone. All of
them inherit the environment in which the command started the program. So one variable names the command there, and
``/proc`` says which processes have it (proc(5), ``environ``).
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

COMMANDS_VARIABLE = "IRIS_COMMANDS"
"""The numbers of the processes that are commands and run this process' program, the outermost first."""

# What ends by itself when the processes are gone for which it works, and tidies up after them.
_HELPERS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")
# What these get for that; what a program gets to end by itself; and all processes to go, once they are killed.
HELPERS_S, LEAVING_S, GOING_S = 2.0, 2.0, 10.0
INTERVAL_S = 0.01

_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_CHILD_SUBREAPER = 36  # prctl(2), <linux/prctl.h>


@contextlib.contextmanager
def as_command() -> Iterator[None]:
    """While this process is a command that runs programs: signals end it in order, and orphans become its children.

    Ctrl-C, SIGTERM and SIGHUP raise `SystemExit` with the exit status that a shell would give. A second one is ignored:
    the first is being obeyed, and what is left to do takes seconds.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for each in _ENDING_SIGNALS:
        if signal.getsignal(each) is not signal.SIG_IGN:  # as nohup(1) wants it
            signal.signal(each, _end_command)
    try:
        yield
    finally:
        # Those that were orphans. Without this they would stay zombies until this process has ended, too.
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


# How many blocks of `undisturbed` have been entered, and the signal that came meanwhile.
_holds = 0
_held: int | None = None


def _end_command(number: int, _: FrameType | None = None) -> None:
    global _held
    if _holds:
        _held = number
        return
    for each in _ENDING_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """While this lasts, a signal that would end the command waits: what it tidies up is not left half done.

    (Not by a mask of signals: other threads of the process, which numpy has, would take them.)
    """
    global _holds
    _holds += 1
    try:
        yield
    finally:
        _holds -= 1
        if _held is not None and not _holds:
            _end_command(_held)


def command_line(program: Path, arguments: Sequence[str], num_ranks: int | None = None) -> list[str]:
    """What starts the program, or ``num_ranks`` of it by torchrun. A rank of torchrun starts one, as which it runs."""
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return [sys.executable, *(ranks if num_ranks and "RANK" not in os.environ else ()), str(program), *arguments]


@contextlib.contextmanager
def running(command: Sequence[str], settings: dict[str, str], **options: Any) -> Iterator[subprocess.Popen]:
    """A program while it runs, with ``settings`` in its environment. When the block is left, all of it has ended.

    ``command``: its `command_line`. ``options`` are those of `subprocess.Popen`.
    """
    environment = os.environ | settings | {COMMANDS_VARIABLE: _mark()}
    process = None
    try:
        # In a session of its own: a Ctrl-C is for the command, which ends the program in order.
        process = subprocess.Popen(command, env=environment, start_new_session=True, **options)
        yield process
    finally:
        with undisturbed():
            if process is not None and process.poll() is None:
                # Like a Ctrl-C, at which it removes its own temporary files.
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(LEAVING_S)
            _end_all()
            if process is not None:
                process.wait()


def members() -> list[int]:
    """The processes that run this command's program, or belong to it."""
    name, mine = COMMANDS_VARIABLE.encode(), _mark().encode()
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        # It ends meanwhile, or is another user's.
        with contextlib.suppress(OSError):
            for setting in Path(entry.path, "environ").read_bytes().split(b"\0"):
                variable, _, value = setting.partition(b"=")
                # Or a command's that this command's program has started.
                if variable == name and (value + b"/").startswith(mine + b"/"):
                    found.append(int(entry.name))
    return found


def _mark() -> str:
    outer = os.environ.get(COMMANDS_VARIABLE)
    return f"{outer}/{os.getpid()}" if outer else str(os.getpid())


def _end_all() -> None:
    begin = time.monotonic()
    while (left := members()) and (now := time.monotonic() - begin) < HELPERS_S + GOING_S:
        for process in left:
            with contextlib.suppress(OSError):
                if now > HELPERS_S or not _is_helper(process):
                    os.kill(process, signal.SIGKILL)
        time.sleep(INTERVAL_S)


def _is_helper(process: int) -> bool:
    command = Path(f"/proc/{process}/cmdline").read_bytes()
    return any(name in command for name in _HELPERS)
