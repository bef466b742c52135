"""Whether ranks whose processes are not known yet are still running.

A rank that ends before it has made a group has not said who it is (`iris.world.members`), so its process cannot be
watched. But from `init_process_group` on it has a connection to the store. Where all ranks are on this host, the system
lists all such connections (proc(5), /proc/net/tcp), and which of them belong to known processes. If none is left over,
no unknown rank is connected. Then all unknown ranks have ended, if it is certain that all had connected before.

With NCCL that is not certain: `init_process_group` returns on a rank before others have begun it. If torchrun has
started the ranks, the system lists their processes instead: they have the id of the run and their rank in their
environment (proc(5), /proc/pid/environ). torchrun itself says nothing of a rank that has ended with status 0.
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
# Backends whose init_process_group returns only when all ranks have come.
MEETING_BACKENDS = ("gloo", "iris")
# When this process has run for so many seconds, torchrun has certainly started all others: it starts them in a row.
ALL_STARTED_S = 10.0

_began = time.monotonic()


def are_gone(store: dist.Store, known: Collection[int]) -> bool:
    """Whether all ranks but this one and those with the PIDs ``known`` have ended. False if that cannot be told."""
    tcp = tcp_store(store)
    if tcp is None or not _is_of_this_host(tcp.host):
        return False
    try:
        if not _all_had_come(tcp):
            return _all_had_started() and not _others_of_the_run(known)
        # In this order: a connection that is made meanwhile counts as a stranger's, so the answer is False.
        ours = {file for number in [*known, *_ancestors()] for file in _sockets(number)}
        return not _connections(tcp.port) - ours
    except (OSError, ValueError):
        return False


def _all_had_come(store: dist.TCPStore) -> bool:
    """Whether all ranks have connected to the store by now.

    They have if the backend makes all ranks meet in `init_process_group`. They also have if torch made the store on
    rank 0, as for ``env://``: there rank 0 waits for all to connect, and only then becomes known. A store that the
    program has made may wait for nobody.
    """
    is_of_rank_0 = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    has_waited = is_of_rank_0 and os.environ.get("MASTER_PORT") == str(store.port)
    return has_waited or any(name in dist.get_backend_config() for name in MEETING_BACKENDS)


def _all_had_started() -> bool:
    """Whether torchrun has started all ranks, on this host."""
    started = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return started and _runs_here() and time.monotonic() - _began > ALL_STARTED_S


def _others_of_the_run(known: Collection[int]) -> bool:
    """Whether a process of this run of torchrun's is there, other than this one, the known ones and their children.

    Raises `OSError` if that cannot be told.
    """
    own = _run_and_rank(os.getpid())
    if not all(own):
        raise OSError("This process was not started by torchrun.")
    of_known = {own, *map(_run_and_rank, known)}
    others = (_run_and_rank(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return any(other[0] == own[0] and other not in of_known for other in others)


def _run_and_rank(number: int) -> tuple[str, str]:
    """The run id and the rank that torchrun has given a process.

    Empty texts if it has ended, is another user's, or was not started by torchrun.
    """
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
    """Whether all ranks are on this host, as torchrun says."""
    return os.environ.get("LOCAL_WORLD_SIZE", "0") == os.environ.get("WORLD_SIZE", "")


def _connections(port: int) -> set[str]:
    """The open connections to this port: the inode of the client's socket of each."""
    found = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        if os.path.exists(table):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if int(fields[2].rpartition(":")[2], 16) == port and fields[3] == ESTABLISHED:
                    found.add(fields[9])
    return found


def _ancestors() -> Iterator[int]:
    """The PIDs of this process and its ancestors. One may be torchrun's agent, which is connected to the store, too."""
    number = os.getpid()
    while number > 1:
        yield number
        status = Path(f"/proc/{number}/status").read_text()
        number = int(status.partition("\nPPid:")[2].split()[0])


def _sockets(number: int) -> Iterator[str]:
    """The inodes of the sockets that a process has open."""
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
