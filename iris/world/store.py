"""The *store* of a process group, its small key-value server, and how to wait for what others write there."""

import socket
import threading
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

# The pause between two looks, in seconds, is a share of the time waited so far, so a wait lasts longer by no more than
# that share; and it is never more than LONGEST_PAUSE_S. A wait inside the store itself would end a little sooner, but
# neither a signal (Ctrl-C) nor a death would interrupt it.
SHARE, LONGEST_PAUSE_S = 1 / 8, 5e-3
# A pause takes the system longer than asking a few times does (prctl(2), PR_SET_TIMERSLACK: 50 µs).
NO_PAUSE_S = 3e-4
# How often to look whether a server is still there that does not answer, and how long one may take to accept.
CONNECT_INTERVAL_S, CONNECT_LIMIT_S = 0.1, 10.0


def tcp_store(store: dist.Store) -> dist.TCPStore | None:
    """What is below all prefixes, if that is a server of torch's own."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, dist.TCPStore) else None


def own_client(store: dist.Store) -> dist.Store:
    """A connection of its own to the same server: torch locks one while a thread uses it. Signals interrupt it.

    Raises `torch.distributed.DistNetworkError` if there is no server any more.
    """
    made: list[dist.Store | Exception] = []

    def connect() -> None:
        try:
            made.append(store.clone())
        except Exception as error:
            made.append(error)

    # In a thread, which is left alone where the server is gone: torch tries again up to the store's time limit there.
    thread = threading.Thread(target=connect, name="iris-store", daemon=True)
    thread.start()
    thread.join(CONNECT_INTERVAL_S)
    while not made:
        _check_server(store)
        thread.join(CONNECT_INTERVAL_S)
    (client,) = made
    if isinstance(client, dist.DistError):
        raise client
    # A store that is written in Python has no clones.
    return store if isinstance(client, Exception) else client


def _check_server(store: dist.Store) -> None:
    tcp = tcp_store(store)
    if tcp is not None:
        try:
            # One that is stopped accepts connections all the same: the system does so for it.
            socket.create_connection((tcp.host, tcp.port), timeout=CONNECT_LIMIT_S).close()
        except OSError as error:
            raise dist.DistNetworkError(f"No store at {tcp.host}:{tcp.port}: {error}") from error


def await_keys(store: dist.Store, keys: Sequence[str], timeout_s: float, look: Callable[[float], None]) -> bool:
    """Whether all ``keys`` came to be within the time limit. Signals interrupt it.

    ``look`` is called again and again with the seconds that were waited, and ends the wait by what it raises.
    """
    start = time.monotonic()
    while not store.check(keys):
        waited = time.monotonic() - start
        if waited > timeout_s:
            return False
        look(waited)
        if waited > NO_PAUSE_S:
            time.sleep(min(waited * SHARE, LONGEST_PAUSE_S))
    return True
