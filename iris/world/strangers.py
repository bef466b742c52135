"""Whether ranks that have not introduced themselves are still there.

Of a rank that ends before it has made a group nobody knows the process. But from `init_process_group` on it has a
connection to the store. Where all ranks are on this host, the system lists these connections (proc(5), /proc/net/tcp),
and the files of the processes that are known: what is left over belongs to strangers. Where nothing is left over, there
are none. They have ended then, if it is sure that all had come: with NCCL, ranks that torchrun has started go on from
`init_process_group` before others have begun it.
"""

import os
from collections.abc import Iterable, Iterator
from ipaddress import ip_address
from pathlib import Path

import torch.distributed as dist

from iris.world.store import tcp_store

# The state of a connection whose both ends are open (Linux, include/net/tcp_states.h).
ESTABLISHED = "01"
# Backends whose groups are made when all members are there.
MEETING_BACKENDS = ("gloo", "iris")


def are_gone(store: dist.Store, known: Iterable[int]) -> bool:
    """Whether all ranks had come, and no process but this one and those with the numbers ``known`` is connected still.

    False also where that is unknown.
    """
    tcp = tcp_store(store)
    if tcp is None or not _is_of_this_host(tcp.host) or not _all_had_come(tcp):
        return False
    try:
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


def _is_of_this_host(host: str) -> bool:
    """Whether all ranks are here: nobody else could reach a store at such an address, or torchrun says so."""
    try:
        local = ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    return local or os.environ.get("LOCAL_WORLD_SIZE", "0") == os.environ.get("WORLD_SIZE", "")


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
