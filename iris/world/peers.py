"""Watches the processes of this host's other ranks, so that the end of one is known at once.

A pidfd becomes readable when its process ends, however that happens (pidfd_open(2)). One thread holds the pidfds of all
peers and blocks in poll(2), which costs nothing. A stopped process (SIGSTOP) has not ended.

`iris.world.remote_peers` does the same for other hosts. Both call the ``listeners``: `iris.world.members`, which tells
other hosts, and `iris.failures.peer_loss`, which ends processes whose kernels would wait for ever.
"""

import contextlib
import fcntl
import os
import select
import signal
import socket
import struct
import threading
from collections.abc import Callable
from typing import NamedTuple

# The ioctl that gives the exit status of a process that its parent has reaped already (linux/pidfd.h, Linux 6.15). The
# number of the request holds the size of struct pidfd_info's first version, of which the exit status is the last word.
PIDFD_GET_INFO, PIDFD_INFO_EXIT, PIDFD_INFO = 0xC040FF0B, 1 << 3, "QQ12i"

# How often to look at peers without a pidfd: where the system is older than Linux 5.3, or a container forbids it.
INTERVAL_S = 0.25


def host_id() -> str:
    """A text that is unique to this host, and the same in all of its containers, which have host names of their own."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()


class Identity(NamedTuple):
    """A process: its host, its PID namespace there, its PID, and its start time, since PIDs are reused."""

    host: str
    namespace: str
    number: int
    began: str


class Peer:
    """A process of another rank.

    Attributes
    ----------
    identity : Identity
    watched : bool
        Whether this host's system reports its end. It does not for processes of other hosts or other PID namespaces:
        `iris.world.remote_peers` watches those.
    ended : bool
        Whether it is known to have ended.
    status : int or None
        How it ended, as `subprocess.Popen.returncode`: the exit status, or minus the signal. None: not known.
    host_name : str or None
        What messages call its host, if that is another one than this.
    unreachable : bool
        Whether its host does not answer any more.
    """

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.watched = identity[:2] == own_identity()[:2]
        self.ended = False
        self.status: int | None = None
        self.host_name: str | None = None
        self.unreachable = False

    def __str__(self) -> str:
        """How it ended, as said after its rank: "its process (77) was killed by SIGKILL"."""
        who = f"its process ({self.identity.number})" + (f" on {self.host_name}" if self.host_name else "")
        if self.unreachable:
            return f"{self.host_name} does not answer any more"
        if self.status is None:
            return f"{who} has ended"
        if self.status >= 0:
            return f"{who} has ended with exit status {self.status}"
        try:
            name = signal.Signals(-self.status).name
        except ValueError:  # one of the real-time signals
            name = f"signal {-self.status}"
        return f"{who} was killed by {name}"


listeners: list[Callable[[Peer], None]] = []
"""Called with each peer that has ended, in the thread that watches."""

_lock = threading.Lock()
_peers: dict[Identity, Peer] = {}
_waker = -1  # an eventfd(2) that lets the thread look for new peers
_own: Identity | None = None


def own_identity() -> Identity:
    """This process."""
    global _own
    if _own is None:
        namespace = os.readlink("/proc/self/ns/pid")
        _own = Identity(host_id(), namespace, os.getpid(), _stat(os.getpid())[1])
    return _own


def watch(identity: Identity) -> Peer:
    """Watch the process of this identity until it ends. Local; equal identities give the same `Peer`."""
    global _waker
    with _lock:
        if identity not in _peers:
            _peers[identity] = Peer(identity)
            if _waker < 0:
                _waker = os.eventfd(0, os.EFD_CLOEXEC)
                threading.Thread(target=_watch, args=(_waker,), name="iris-peers", daemon=True).start()
            os.eventfd_write(_waker, 1)
        return _peers[identity]


def _forget() -> None:
    """In a forked child: start anew, as it has no such thread, and another PID."""
    global _waker, _own, _lock
    _waker, _own, _lock = -1, None, threading.Lock()
    _peers.clear()


os.register_at_fork(after_in_child=_forget)


def _watch(waker: int) -> None:
    """The thread: wait for the end of any peer, and for new peers."""
    poll = select.poll()
    by_pidfd: dict[int, Peer] = {}
    polled: set[Peer] = set()  # those without a pidfd
    poll.register(waker, select.POLLIN)
    while True:
        for file, _ in poll.poll(1000 * INTERVAL_S if polled else None):
            if file == waker:
                os.eventfd_read(waker)
                with _lock:
                    new = [peer for peer in _peers.values() if peer.watched and not peer.ended]
                for peer in set(new) - polled - set(by_pidfd.values()):
                    _open(peer, poll, by_pidfd, polled)
            else:
                peer = by_pidfd.pop(file)
                poll.unregister(file)
                note_end(peer, _exit_status(peer.identity.number, file))
                os.close(file)
        for peer in [each for each in polled if not _lives(each)]:
            polled.discard(peer)
            note_end(peer, _exit_status(peer.identity.number, None))


def _open(peer: Peer, poll: select.poll, by_pidfd: dict[int, Peer], polled: set[Peer]) -> None:
    """Begin to watch a peer: by a pidfd, or in ``polled`` if there can be none. It may have ended already."""
    try:
        file = os.pidfd_open(peer.identity.number)
    except ProcessLookupError:
        note_end(peer, None)
        return
    except (OSError, AttributeError):
        polled.add(peer)
        return
    if not _is_same_process(peer):
        os.close(file)
        note_end(peer, None)
        return
    by_pidfd[file] = peer
    poll.register(file, select.POLLIN)


def note_end(peer: Peer, status: int | None) -> None:
    """Note that a process has ended, and call the listeners. Any thread."""
    peer.status, peer.ended = status, True
    for listener in listeners:
        listener(peer)


def _is_same_process(peer: Peer) -> bool:
    """Whether the process that has its PID now is this one, and not a later one."""
    return _stat(peer.identity.number)[1] == peer.identity.began


def _lives(peer: Peer) -> bool:
    return _stat(peer.identity.number)[0] not in "ZX" and _is_same_process(peer)


def _exit_status(number: int, pidfd: int | None) -> int | None:
    """The exit status of a process that has just ended; None if it cannot be known."""
    code = None
    state, _, last = _stat(number)
    if state == "Z":
        # A zombie: its parent has not reaped it yet. The last field is the exit code, where one may see it (proc(5)).
        code = int(last)
    elif pidfd is not None:
        info = bytearray(struct.pack(PIDFD_INFO, PIDFD_INFO_EXIT, *[0] * 13))
        with contextlib.suppress(OSError):  # an older system does not know the request
            fcntl.ioctl(pidfd, PIDFD_GET_INFO, info)
            mask, *_, exit_code = struct.unpack(PIDFD_INFO, info)
            code = exit_code if mask & PIDFD_INFO_EXIT else None
    return None if code is None else os.waitstatus_to_exitcode(code)


def _stat(number: int) -> tuple[str, str, str]:
    """State, start time and exit code of the process with this PID; state "X" and empty texts if there is none."""
    try:
        with open(f"/proc/{number}/stat") as file:
            # The name, in parentheses, may hold anything, also spaces and parentheses.
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return "X", "", ""
    return fields[0], fields[19], fields[-1]
