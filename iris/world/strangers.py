"""Whether ranks that have not introduced themselves are still there.

Of a rank that ends before it has made a group nobody knows the process. But from `init_process_group` on it has a
connection to the store. Where all ranks are on this host, the system lists these connections (proc(5), /proc/net/tcp),
and the files of the processes that are known: what is left over belongs to strangers. Where nothing is left over, there
are none. They have ended then, if it is sure that all had come.

With NCCL, ranks that torchrun has started go on from `init_process_group` before others have begun it. Of these the
system lists the processes: they have the number of the run and their rank in their environment (proc(5),
/proc/pid/environ). Of torchrun nobody would learn that one has ended, if it did so with status 0.
"""

import os
import time
from collections.abc import Collection, Iterator
from ipaddress import ip_address
from pathlib import Path

import torch.distributed as dist

from iris.world.store import tcp_store

# The state of a connection whose both ends are open (Linux, include/net/tcp_states.h).
ESTABLISHED = "01"
# Backends whose groups are made when all members are there.
MEETING_BACKENDS = ("gloo", "iris")
# How long this process is there, in seconds, until torchrun has surely started all others: it does not wait in between.
ALL_STARTED_S = 10.0

_began = time.monotonic()


def are_gone(store: dist.Store, known: Collection[int]) -> bool:
    """Whether all ranks but this one and those with the numbers ``known`` have ended. False also if that is unknown."""
    tcp = tcp_store(store)
    if tcp is None or not _is_of_this_host(tcp.host):
        return False
    try:
        if not _all_had_come(tcp):
            return _all_had_started() and not _others_of_the_run(known)
        # In this order: whoever connects meanwhile is missed by neither.
        ours = {file for number in [*known, *_ancestors()] for file in _sockets(number)}
        return not _connections(tcp.port) - ours
    except (OSError, ValueError):
        return False


def _all_had_come(store: dist.TCPStore) -> bool:
    """Whether nobody is still to come, if only known ranks are connected.

    The backend has had all meet; or rank 0 has the store, and torch has it wait there for all to be connected, as it
    does for ``env://``: then it is not known before. Who gives torch a store may have one that waits for nobody.
    """
    is_of_rank_0 = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    has_waited = is_of_rank_0 and os.environ.get("MASTER_PORT") == str(store.port)
    return has_waited or any(name in dist.get_backend_config() for name in MEETING_BACKENDS)


def _all_had_started() -> bool:
    """Whether torchrun has started all ranks, on this host."""
    started = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return started and _runs_here() and time.monotonic() - _began > ALL_STARTED_S


def _others_of_the_run(known: Collection[int]) -> bool:
    """Whether there is a process of torchrun's, but for those and this one and what these have started.

    Raises `OSError` if that is unknown.
    """
    own = _run_and_rank(os.getpid())
    if not all(own):
        raise OSError("This process was not started by torchrun.")
    of_known = {own, *map(_run_and_rank, known)}
    others = (_run_and_rank(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return any(other[0] == own[0] and other not in of_known for other in others)


def _run_and_rank(number: int) -> tuple[str, str]:
    """Those that torchrun has given a process, as far as one may know; empty where it has ended, or is none of its."""
    try:
        text = Path(f"/proc/{number}/environ").read_bytes().decode(errors="replace")
    except OSError:  # another user's, or it has ended
        return "", ""
    environment = dict(each.partition("=")[::2] for each in text.split("\0"))
    return environment.get("TORCHELASTIC_RUN_ID", ""), environment.get("RANK", "")


def _is_of_this_host(host: str) -> bool:
    """Whether all ranks are here: nobody else could reach a store at such an address, or torchrun says so."""
    try:
        local = ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    return local or _runs_here()


def _runs_here() -> bool:
    """Whether torchrun says that all ranks are on this host."""
    return os.environ.get("LOCAL_WORLD_SIZE", "0") == os.environ.get("WORLD_SIZE", "")


def _connections(port: int) -> set[str]:
    """The open connections to this port, by the number of the socket at the client's end."""
    found = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        if os.path.exists(table):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if int(fields[2].rpartition(":")[2], 16) == port and fields[3] == ESTABLISHED:
                    found.add(fields[9])
    return found


def _ancestors() -> Iterator[int]:
    """This process, and those that have started it, of which torchrun's agent may be connected too."""
    number = os.getpid()
    while number > 1:
        yield number
        status = Path(f"/proc/{number}/status").read_text()
        number = int(status.partition("\nPPid:")[2].split()[0])


def _sockets(number: int) -> Iterator[str]:
    folder = f"/proc/{number}/fd"
    try:
        files = os.listdir(folder)
    except OSError:  # another user's, or it has ended
        return
    for file in files:
        try:
            target = os.readlink(f"{folder}/{file}")
        except OSError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            yield target[len("socket:[") : -1]
