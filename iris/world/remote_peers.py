"""Watches the processes of other hosts' ranks, by a TCP connection to each on which no data are sent.

The system closes a connection when its process ends, however that happens, and the other end becomes readable. Where a
whole host or the network is gone, nobody closes anything: then keepalive finds that nobody answers (tcp(7),
SO_KEEPALIVE). All other connections of this process to that host are shut down then, since calls of torch would wait on
them until the system stops retransmitting, which takes many minutes. A stopped process (SIGSTOP) has not ended: its
system answers for it.
"""

import contextlib
import errno
import os
import select
import socket
import stat
import threading
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address

import torch.distributed as dist

from iris.log import logger
from iris.world import peers
from iris.world.peers import Peer
from iris.world.store import CONNECT_LIMIT_S, tcp_store

# TCP keepalive: idle seconds before the first probe, seconds between probes, and probes without an answer until the
# host counts as gone: 20 s in all.
IDLE_S, INTERVAL_S, COUNT = 5, 5, 3
# Connections that may wait for accept(): all ranks of other hosts connect at once.
BACKLOG = 1024
# SO_ERROR of a connection whose process has ended, and whose host still answers.
CLOSED = (0, errno.ECONNRESET, errno.EPIPE)

_lock = threading.Lock()
_listener: socket.socket | None = None
_name = ""  # the address or host name by which other hosts reach the listener
_waker = -1  # an eventfd(2) that lets the thread look for new connections
_watched: dict[int, tuple[socket.socket, Peer, str]] = {}  # by file descriptor; the last is the host's address
_accepted: dict[int, socket.socket] = {}  # connections from ranks of other hosts that watch this process
_gone: set[str] = set()  # addresses that do not answer any more


def listen(store: dist.Store) -> tuple[str, int] | None:
    """Listen for ranks of other hosts. Returns address and port; None if it cannot listen, with a warning. Local.

    In the network of the store. Nothing is read from the connections.
    """
    global _listener, _name
    with _lock:
        if _listener is None:
            try:
                address = _own_address(store)
                here = ip_address(address)
                # On this host alone, its name may resolve to loopback (Debian's 127.0.1.1). Other hosts use the name,
                # and this one listens on all addresses.
                _name = _own_name(store) if here.is_loopback else address
                place = ("::" if here.version == 6 else "0.0.0.0") if here.is_loopback else address
                _listener = socket.create_server((place, 0), family=_family(address), backlog=BACKLOG)
                # A client may be gone before accept(), which would then block the thread that watches all others.
                _listener.setblocking(False)
            except OSError as error:
                logger.warning("Other hosts cannot connect to this process: %s. Its end is noticed late there.", error)
                return None
        return _name, _listener.getsockname()[1]


def watch(remote: Sequence[tuple[Peer, tuple[str, int] | None, str]]) -> None:
    """Watch these processes until they end. Local.

    Each comes with the address and port at which it listens, or None, and with the name of its host. A host that cannot
    be reached is left out, with a warning: the end of its ranks is then noticed late.
    """
    global _waker
    with _lock:
        known = {peer for _, peer, _ in _watched.values()}
    out_of_reach: set[str] = set()
    for peer, address, host_name in remote:
        peer.host_name = host_name
        if address is None or peer in known or host_name in out_of_reach:
            continue
        try:
            connection = socket.create_connection(address, timeout=CONNECT_LIMIT_S)
        except OSError as error:
            out_of_reach.add(host_name)
            logger.warning("%s (%s:%d) cannot be reached: %s. Its end is noticed late.", host_name, *address, error)
            continue
        connection.setblocking(False)
        _keep_alive(connection)
        with _lock:
            _watched[connection.fileno()] = connection, peer, connection.getpeername()[0]
    with _lock:
        if _waker < 0 and (_watched or _listener is not None):
            _waker = os.eventfd(0, os.EFD_CLOEXEC)
            threading.Thread(target=_watch, args=(_waker,), name="iris-remote-peers", daemon=True).start()
        if _waker >= 0:
            os.eventfd_write(_waker, 1)


def _own_address(store: dist.Store) -> str:
    """The address of this host in the network of the store."""
    tcp = tcp_store(store)
    if tcp is None:
        return socket.gethostbyname(socket.gethostname())
    with socket.create_connection((tcp.host, tcp.port), timeout=CONNECT_LIMIT_S) as connection:
        return connection.getsockname()[0]


def _own_name(store: dist.Store) -> str:
    """The name by which other hosts know this one. If there is a TCPStore, this host holds it."""
    tcp = tcp_store(store)
    return socket.gethostname() if tcp is None else tcp.host


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, COUNT)


def _watch(waker: int) -> None:
    """The thread: wait for the end of connections, for new ones of `watch`, and for clients of the listener."""
    poll, polled, listener = select.poll(), set[int](), _listener
    for file in (waker, *([] if listener is None else [listener.fileno()])):
        poll.register(file, select.POLLIN)
    while True:
        for file, _ in poll.poll():
            if listener is not None and file == listener.fileno():
                # The lock keeps forks out meanwhile (below). The error that the client has gone already is suppressed.
                with _lock, contextlib.suppress(OSError):
                    connection, _ = listener.accept()
                    _accepted[connection.fileno()] = connection
                    poll.register(connection.fileno(), select.POLLIN)
            elif file == waker:
                os.eventfd_read(waker)
                with _lock:
                    new = set(_watched) - polled
                for each in new:
                    poll.register(each, select.POLLIN)
                polled |= new
            elif file in _accepted:
                poll.unregister(file)
                _accepted.pop(file).close()
            else:
                poll.unregister(file)
                polled.discard(file)
                _connection_ended(file)


def _connection_ended(file: int) -> None:
    """The connection of this file descriptor has ended, as its process has ended, or its host does not answer."""
    with _lock:
        connection, peer, address = _watched.pop(file)
        there = [other for _, other, its in _watched.values() if its == address]
    with connection:
        how = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if how not in CLOSED:
        for each in (peer, *there):
            each.unreachable = not each.ended
    if not peer.ended:
        peers.note_end(peer, None)
    if peer.unreachable and address not in _gone:
        _gone.add(address)
        _cut(ip_address(address))


def _cut(address: IPv4Address | IPv6Address) -> None:
    """Shut down all of this process's connections to an address, whoever made them: nobody is at the other end."""
    for file in map(int, os.listdir("/proc/self/fd")):
        # Suppressed for files that have been closed meanwhile, and for sockets without a peer.
        with contextlib.suppress(OSError, ValueError):
            if not stat.S_ISSOCK(os.fstat(file).st_mode):
                continue
            with socket.socket(fileno=os.dup(file)) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    other = ip_address(connection.getpeername()[0])
                    if address in (other, getattr(other, "ipv4_mapped", None)):
                        connection.shutdown(socket.SHUT_RDWR)


def _forget() -> None:
    """In a forked child: close its copies, which would keep the connections open. It has no such thread, either."""
    global _listener, _waker
    for connection in (*(each for each, _, _ in _watched.values()), *_accepted.values()):
        connection.close()
    if _listener is not None:
        _listener.close()
    if _waker >= 0:
        os.close(_waker)
    _listener, _waker = None, -1
    _watched.clear()
    _accepted.clear()
    _lock.release()


# A fork waits for the lock. A connection that is just accepted, and not noted yet, would stay open in the child, and
# whoever is at its other end would not learn that this process has ended.
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_forget)
