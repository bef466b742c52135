"""Ends a process with a GPU when one of its peers has ended, as its kernels may wait for that peer for ever.

The host then waits for the kernels, in a call of the driver that no signal interrupts. So a thread prints at once what
is known. After a grace period it ends the process with `PeerLostError` (`iris.failures.process_end`), if the process
still shares memory with the peer, or its GPU is still at work. Meetings on the host, and kernels in the simulator,
raise the error by themselves.
"""

import atexit
import threading
import time

import torch

from iris import mode
from iris.errors import PeerLostError, names
from iris.failures.process_end import ABORTS, GRACE_S, VARIABLE, end_by, is_done, place, say
from iris.heap.mapping import Mapping, mappings
from iris.world import farewell, peers
from iris.world.peers import Peer

# How many of the library's calls are listed at most: those that were used last.
MOST_CALLS = 3
# How often to look whether kernels wait for a rank whose program has ended with status 0.
INTERVAL_S = 1.0

# The devices whose memory is shared with a rank that has ended. A thread holds the lock while it waits for them.
_devices: set[torch.device] = set()
_draining = threading.Lock()


def _on_peer_end(peer: Peer) -> None:
    """A listener of `iris.world.peers`. Its thread must not wait here."""
    if mode.ACTIVE:
        return
    shared = _shared_with_lost()
    _devices.update(mapping.device for mapping in shared)
    if shared or _steps(peer):
        threading.Thread(target=_end_after_grace, args=(peer,), name="iris-peer-loss", daemon=True).start()


peers.listeners.append(_on_peer_end)


def _shared_with_lost() -> list[Mapping]:
    """The mappings in use that are shared with a rank that has ended."""
    return [mapping for mapping in mappings() if mapping.memory is not None and mapping.lost(well=True)]


def _steps(peer: Peer) -> list[str]:
    """The steps that groups with this peer are in the middle of (`Group.agree`)."""
    return [group.step for group in list(farewell.groups) if group.step and peer in group.members.processes]


def _end_after_grace(peer: Peer) -> None:
    """The thread: print what has happened, wait, and end the process if it still depends on the peer."""
    if peer.status != 0:
        say(f"{_report()} {_outlook()}")
        time.sleep(GRACE_S)
        ends = bool(_shared_with_lost() or _steps(peer)) or not is_done(_drain, GRACE_S)
    else:
        # The program of the peer ended well, so this one may need nothing of it. Only a kernel that waits matters.
        while not (ends := not is_done(_drain, GRACE_S)) and _shared_with_lost():
            time.sleep(INTERVAL_S)
        if ends:
            say(f"{_report()} The GPU has been at work for {GRACE_S:g} s since, or waits.")
    if ends and ABORTS:
        end_by(PeerLostError(f"{_report()} After {GRACE_S:g} s this rank ends ({VARIABLE}=abort)."))


def _drain() -> None:
    # Each device is named. Without it, the call would make a CUDA context on device 0, the new thread's current one.
    with _draining:
        for device in list(_devices):
            torch.cuda.synchronize(device)


def _await_drain() -> None:
    """Wait for a thread in `_drain`: if it returned from C++ while the interpreter ends, the process would abort."""
    if _draining.acquire(timeout=GRACE_S):
        _draining.release()


atexit.register(_await_drain)


def _report() -> str:
    """Who has ended, and where this rank is."""
    shared = _shared_with_lost()
    gone = list(dict.fromkeys(text for mapping in shared for text in mapping.lost(well=True)))
    own = sorted({mapping.ranks[mapping.rank] for mapping in shared})
    where = f"{names(own).capitalize() if own else 'This rank'} is {place()}."
    return f"{'; '.join(gone)}. {where}"


def _outlook() -> str:
    """Which kernels may wait, as far as the library knows, and what will become of this process."""
    # Not by asking the device: such a call may wait for the kernels, and hold the GIL meanwhile.
    owners = [mapping.owner() for mapping in _shared_with_lost()]
    calls = [name for owner in owners if hasattr(owner, "uses") for name in owner.uses()]
    more = [f"{len(calls) - MOST_CALLS} others"] if len(calls) > MOST_CALLS else []
    whose = ", ".join(["yours", *calls[-MOST_CALLS:], *more])
    kernels = f"Kernels that share memory with it may wait for ever: {whose}."
    if ABORTS:
        return (
            f"{kernels} This process ends in {GRACE_S:g} s, unless it closes that memory; {VARIABLE}=report keeps it."
        )
    return f"{kernels} This process goes on, as {VARIABLE}=report says."
