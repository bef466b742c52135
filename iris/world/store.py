"""The *store* of torch.distributed, a small key-value server: connections to it, and how to wait for its keys.

Meetings (`iris.world.group`) go through it.
"""

import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import torch.distributed as dist

# The pause between two looks, in seconds, is a share of the time waited so far, so a wait lasts longer by no more than
# that share; and it is never more than LONGEST_PAUSE_S. A wait inside the store itself would end a little sooner, but
# neither a signal (Ctrl-C) nor a death would interrupt it.
SHARE, LONGEST_PAUSE_S = 1 / 8, 5e-3
# The first looks follow each other without a pause: the shortest sleep takes longer than a few looks (prctl(2),
# PR_SET_TIMERSLACK: 50 µs).
NO_PAUSE_S = 3e-4
# How often to look whether a server is still there that does not answer, and how long one may take to accept.
CONNECT_INTERVAL_S, CONNECT_LIMIT_S = 0.1, 10.0


def tcp_store(store: dist.Store) -> dist.TCPStore | None:
    """The TCPStore below all prefixes; None if the store is of another kind."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, dist.TCPStore) else None


# The shared connections, by the store of torch's default group.
_clients: "weakref.WeakKeyDictionary[dist.Store, dist.Store]" = weakref.WeakKeyDictionary()
_connecting = threading.Lock()


def shared_client(store: dist.Store) -> dist.Store:
    """The one connection to the server of ``store`` that all who ask for it share, beside that of torch itself.

    torch locks a connection while a thread uses it, also during a wait. Users of this one only look at keys
    (`await_keys`), which is short, so threads do not hold each other up. A connection for each group would be too
    many: the server's one thread looks up the host name of each client, which takes seconds where no name server
    answers.

    Raises `torch.distributed.DistNetworkError` if there is no server any more.
    """
    with _connecting:
        if store not in _clients:
            client = own_client(store)
            if client is store:  # kept here, it would keep itself
                return store
            _clients[store] = client
        return _clients[store]


def put(store: dist.Store, key: str, value: bytes) -> None:
    """``store.set`` with bytes, which it takes, though torch's annotations say str."""
    store.set(key, value)  # type: ignore[arg-type]


def own_client(store: dist.Store) -> dist.Store:
    """A new connection to the same server. Signals interrupt it.

    Raises `torch.distributed.DistNetworkError` if there is no server any more.
    """
    made: list[dist.Store | Exception] = []

    def connect() -> None:
        try:
            made.append(store.clone())  # type: ignore[attr-defined]
        except Exception as error:
            made.append(error)

    # In a thread: where the server is gone, torch retries until the store's time limit. Then the thread is left alone.
    thread = threading.Thread(target=connect, name="iris-store", daemon=True)
    thread.start()
    thread.join(CONNECT_INTERVAL_S)
    while not made:
        _check_server(store)
        thread.join(CONNECT_INTERVAL_S)
    (client,) = made
    if isinstance(client, dist.DistError):
        raise client
    # Only torch's TCPStore can be cloned. Others, as those written in Python, are used as they are.
    return store if isinstance(client, Exception) else client


def _check_server(store: dist.Store) -> None:
    tcp = tcp_store(store)
    if tcp is not None:
        try:
            # A stopped server (SIGSTOP) passes this check: its system accepts the connection.
            socket.create_connection((tcp.host, tcp.port), timeout=CONNECT_LIMIT_S).close()
        except OSError as error:
            raise dist.DistNetworkError(f"No store at {tcp.host}:{tcp.port}: {error}") from error


def await_keys(store: dist.Store, keys: Sequence[str], timeout_s: float, look: Callable[[float], None]) -> bool:
    """Wait until all ``keys`` are in the store. Returns whether they were within the time limit. Signals interrupt it.

    ``look`` is called again and again with the seconds waited so far. What it raises ends the wait.
    """
    start = time.monotonic()
    while not store.check(list(keys)):
        waited = time.monotonic() - start
        if waited > timeout_s:
            return False
        look(waited)
        if waited > NO_PAUSE_S:
            time.sleep(min(waited * SHARE, LONGEST_PAUSE_S))
    return True
