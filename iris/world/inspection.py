"""``python -m iris info --pid``: what a process that may hang is doing, and what its memory holds.

A process with a heap listens on an abstract Unix socket that is named after its user and its PID (`listen`). A thread
blocks in accept(2) there, which costs nothing, and answers while other threads wait for a GPU or for peers. The answer
is one JSON object a line. What the host knows comes first, so that there is an answer where the device gives none. The
command asks with `ask`, and shows the answer with `show`.
"""

import contextlib
import json
import os
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from iris import mode
from iris.errors import ProcessUnreachableError
from iris.log import logger

# Seconds to wait for each line of an answer. A line holds 1 MiB of memory at most, which is copied from the device.
PATIENCE_S = 10.0

_THREAD_NAME = "iris-inspection"
_listener: socket.socket | None = None


def listen() -> None:
    """Answer questions from now on. Local. Does nothing the second time, nor where the socket cannot be made."""
    global _listener
    if _listener is not None:
        return
    _listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _listener.bind(_address(os.getpid()))
        _listener.listen()
    except OSError as error:
        logger.debug("This process cannot be inspected: %s", error)
        return
    threading.Thread(target=_serve, args=(_listener,), name=_THREAD_NAME, daemon=True).start()


def _forget() -> None:
    """In a forked child: close the copy, as it has no such thread, and another PID."""
    global _listener
    if _listener is not None:
        _listener.close()
        _listener = None


os.register_at_fork(after_in_child=_forget)


def _address(process: int) -> str:
    return f"\0iris-inspection-{os.geteuid()}-{process}"


def _peer(connection: socket.socket) -> tuple[int, int]:
    """PID and user of the process at the other end, as the kernel knows them (unix(7), SO_PEERCRED)."""
    process, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return process, user


def _serve(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        # A thread for each: an answer that waits for the device must not hold up the next one.
        threading.Thread(target=_answer, args=(connection,), name=_THREAD_NAME, daemon=True).start()


def _answer(connection: socket.socket) -> None:
    with connection, contextlib.suppress(OSError):
        if _peer(connection)[1] == os.geteuid():
            for line in report():
                connection.sendall(json.dumps(line).encode() + b"\n")


memory_reports: list[Callable[[], Iterable[dict[str, Any]]]] = []
"""Functions that return what an answer says after its first line, an object for each part.

`iris.heap` adds one for the memory that this process shares with other ranks, `iris.world.rail_calls` one for the calls
to other hosts. An object has ``kind`` ("heap", "library" or "rail"), ``rank``, ``ranks``, ``device``, and ``lines`` for
people.
"""


def report() -> Iterator[dict[str, Any]]:
    """The lines of an answer: this process, then what the `memory_reports` return. Local; any thread."""
    yield {
        "pid": os.getpid(),
        "command": sys.orig_argv,
        "simulator": mode.ACTIVE,
        "threads": find_threads(),
    }
    for memories in memory_reports:
        yield from memories()


def find_threads() -> list[dict[str, Any]]:
    """Python's threads, the main one first, each with its stack from the outermost call on. Not those of this file."""
    threads = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    found = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda each: each[0] != main):
        name = threads.get(ident, f"thread {ident}")
        if name != _THREAD_NAME:
            stack = [
                f"{each.filename}:{each.lineno} in {each.name}: {each.line}" for each in traceback.extract_stack(frame)
            ]
            found.append({"name": name, "stack": stack})
    return found


def ask(process: int) -> dict[str, Any]:
    """The answer of the process with this PID: its first line, the others as ``memory``, and if it is ``complete``.

    Raises
    ------
    ProcessUnreachableError
        There is no such process, it is another user's, or it does not use Iris; or it does not answer at all.
    """
    try:
        owner = os.stat(f"/proc/{process}").st_uid
    except OSError:
        raise ProcessUnreachableError(f"There is no process {process} on this machine.") from None
    if owner != os.geteuid():
        raise ProcessUnreachableError(
            f"Process {process} belongs to user {owner}, and only that user may ask it; this is user {os.geteuid()}."
        )
    lines, complete = [], False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(PATIENCE_S)
        try:
            connection.connect(_address(process))
            if _peer(connection) != (process, owner):
                raise ConnectionRefusedError
        except OSError:
            raise ProcessUnreachableError(
                f"Process {process} does not listen: it has made no Iris context, or is not in this container."
            ) from None
        # A time-out, or a process that ends in the middle of a line.
        with contextlib.suppress(OSError, ValueError), connection.makefile() as answer:
            for line in answer:
                lines.append(json.loads(line))
            complete = True
    if not lines:
        raise ProcessUnreachableError(
            f"Process {process} has said nothing for {PATIENCE_S:g} s: a call into a library keeps Python's other "
            f"threads from running. A debugger sees more, such as `gdb -p {process}` or `py-spy dump --pid {process}`."
        )
    first, *memory = lines
    return {**first, "memory": memory, "complete": complete}


def show(answer: dict[str, Any]) -> str:
    """An answer, for people."""
    where = "in the simulator" if answer["simulator"] else "on a GPU"
    lines = [f"Process {answer['pid']}, {where}: {' '.join(answer['command'])}"]
    for memory in answer["memory"]:
        if memory["kind"] == "heap":
            lines += memory["lines"]
    for memory in answer["memory"]:
        if memory["kind"] != "heap" and memory["lines"]:
            lines.append(f"What the library has counted on rank {memory['rank']}, among ranks {memory['ranks']}")
            lines += [f"  {line}" for line in memory["lines"]]
    if not answer["complete"]:
        lines.append(f"No more was said for {PATIENCE_S:g} s: the device does not let memory be read.")
    for thread in answer["threads"]:
        lines.append(f"Thread {thread['name']}")
        lines += [f"  {line}" for line in thread["stack"]]
    return "\n".join(lines)
