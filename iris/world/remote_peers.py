"""Watches the processes of other hosts' ranks, by a connection to each that carries nothing.

The system closes a connection when its process ends, however that happens, and the other end becomes readable. Where a
whole host is gone, or the network, nobody closes anything: then the system finds that nobody answers (tcp(7),
SO_KEEPALIVE), and every other connection to that host is cut here, since calls of torch may wait on one for as long as
the system tries again, which is many minutes. A stopped process (SIGSTOP) has not ended: its system answers for it.
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

# When to ask a host of which nothing was heard, how often, and how many times without an answer: 20 s in all.
IDLE_S, INTERVAL_S, COUNT = 5, 5, 3
# Connections that may wait to be accepted: all ranks of other hosts make theirs at once.
BACKLOG = 1024
# What a connection ends by if its process has ended.
CLOSED = (0, errno.ECONNRESET, errno.EPIPE)

_lock = threading.Lock()
_listener: socket.socket | None = None
_name = ""  # by which other hosts find the listener
_waker = -1  # an eventfd(2) that lets the thread look for new connections
_watched: dict[int, tuple[socket.socket, Peer, str]] = {}  # by file; the last is the host's address
_accepted: dict[int, socket.socket] = {}  # those of ranks of other hosts that watch this one
_gone: set[str] = set()  # addresses that do not answer any more


def listen(store: dist.Store) -> tuple[str, int] | None:
    """Where ranks of other hosts find this process: address and port; None if nowhere, with a warning. Local.

    The network is that of the store. Who connects can send nothing that is read.
    """
    global _listener, _name
    with _lock:
        if _listener is None:
            try:
                address = _own_address(store)
                here = ip_address(address)
                # The name of this host may be that of loopback on itself alone (Debian's 127.0.1.1). Others find it by
                # the name.
                _name = _own_name(store) if here.is_loopback else address
                place = ("::" if here.version == 6 else "0.0.0.0") if here.is_loopback else address
                _listener = socket.create_server((place, 0), family=_family(address), backlog=BACKLOG)
                # Who connects may be gone before it is accepted, and the thread waits for nobody alone.
                _listener.setblocking(False)
            except OSError as error:
                logger.warning("Other hosts cannot connect to this process: %s. Its end is noticed late there.", error)
                return None
        return _name, _listener.getsockname()[1]


def watch(remote: Sequence[tuple[Peer, tuple[str, int] | None, str]]) -> None:
    """Note the end of these processes from now on: each with where it listens, and the name of its host. Local.

    A host that cannot be reached is left out, with a warning: that a rank has ended there is then known late.
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
    """That of this host in the network of the store."""
    tcp = tcp_store(store)
    if tcp is None:
        return socket.gethostbyname(socket.gethostname())
    with socket.create_connection((tcp.host, tcp.port), timeout=CONNECT_LIMIT_S) as connection:
        return connection.getsockname()[0]


def _own_name(store: dist.Store) -> str:
    """By which other hosts know this one, which has the store if there is one."""
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
    poll, polled, listener = select.poll(), set[int](), _listener
    for file in (waker, *([] if listener is None else [listener.fileno()])):
        poll.register(file, select.POLLIN)
    while True:
        for file, _ in poll.poll():
            if listener is not None and file == listener.fileno():
                # The lock keeps forks away meanwhile. It is suppressed that whoever connected has gone already.
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
                _note(file)


def _note(file: int) -> None:
    """Its connection has ended, and so has the process; or its host does not answer."""
    with _lock:
        connection, peer, address = _watched.pop(file)
        there = [other for _, other, its in _watched.values() if its == address]
    with connection:
        how = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if how not in CLOSED:
        for each in (peer, *there):
            each.unreachable = not each.ended
    if not peer.ended:
        peers.end(peer, None)
    if peer.unreachable and address not in _gone:
        _gone.add(address)
        _cut(ip_address(address))


def _cut(address: IPv4Address | IPv6Address) -> None:
    """End this process's connections to an address, whoever has them: nobody is at the other end."""
    for file in map(int, os.listdir("/proc/self/fd")):
        # What has been closed meanwhile, or is connected to nobody.
        with contextlib.suppress(OSError, ValueError):
            if not stat.S_ISSOCK(os.fstat(file).st_mode):
                continue
            with socket.socket(fileno=os.dup(file)) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    other = ip_address(connection.getpeername()[0])
                    if address in (other, getattr(other, "ipv4_mapped", None)):
                        connection.shutdown(socket.SHUT_RDWR)


def _forget() -> None:
    """In a forked child, which has no such thread, and whose copies would keep the connections open."""
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
