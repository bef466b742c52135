"""What a process with a GPU does when one of its peers has ended.

Kernels may wait for that one for ever, and the host for them in a call that no signal interrupts. So a thread says at
once what is known, and ends the process with `PeerLostError` after a grace if it is still so
(`iris.failures.process_end`). Meetings on the host, and kernels in the simulator, raise the error by themselves.
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
# How often to look whether kernels wait for a rank whose program has ended well.
INTERVAL_S = 1.0

# The devices whose memory is shared with a rank that has ended. The lock is held while a thread waits for them.
_devices: set[torch.device] = set()
_draining = threading.Lock()


def _attend(peer: Peer) -> None:
    """Called by the thread that watches the peers, which goes on at once."""
    if mode.ACTIVE:
        return
    touched = _touched()
    _devices.update(mapping.device for mapping in touched)
    if touched or _steps(peer):
        threading.Thread(target=_await_end, args=(peer,), name="iris-peer-loss", daemon=True).start()


peers.listeners.append(_attend)


def _touched() -> list[Mapping]:
    """The memory in use that is shared with a rank that has ended."""
    return [mapping for mapping in mappings() if mapping.memory is not None and mapping.lost(well=True)]


def _steps(peer: Peer) -> list[str]:
    """What groups of the peer are doing together right now."""
    return [group.step for group in list(farewell.groups) if group.step and peer in group.members.processes]


def _await_end(peer: Peer) -> None:
    if peer.status != 0:
        say(f"{_report()} {_outlook()}")
        time.sleep(GRACE_S)
        ends = bool(_touched() or _steps(peer)) or not is_done(_drain, GRACE_S)
    else:
        # It may have nothing to do any more: what matters is whether a kernel waits for it.
        while not (ends := not is_done(_drain, GRACE_S)) and _touched():
            time.sleep(INTERVAL_S)
        if ends:
            say(f"{_report()} The GPU has been at work for {GRACE_S:g} s since, or waits.")
    if ends and ABORTS:
        end_by(PeerLostError(f"{_report()} After {GRACE_S:g} s this rank ends ({VARIABLE}=abort)."))


def _drain() -> None:
    # The devices are named: a new thread is at the first one, and would make a context there.
    with _draining:
        for device in list(_devices):
            torch.cuda.synchronize(device)


def _let_drain() -> None:
    """A thread that comes back from C++ while the interpreter ends would end the process by an abort."""
    if _draining.acquire(timeout=GRACE_S):
        _draining.release()


atexit.register(_let_drain)


def _report() -> str:
    """Who has ended, and where this rank is."""
    touched = _touched()
    gone = list(dict.fromkeys(text for mapping in touched for text in mapping.lost(well=True)))
    own = sorted({mapping.ranks[mapping.rank] for mapping in touched})
    where = f"{names(own).capitalize() if own else 'This rank'} is {place()}."
    return f"{'; '.join(gone)}. {where}"


def _outlook() -> str:
    """Which kernels may wait, as far as the library knows, and what will become of this process."""
    # The device is not asked: some calls wait for others that wait for it, and keep Python from going on meanwhile.
    owners = [mapping.owner() for mapping in _touched()]
    calls = [name for owner in owners if hasattr(owner, "uses") for name in owner.uses()]
    more = [f"{len(calls) - MOST_CALLS} others"] if len(calls) > MOST_CALLS else []
    whose = ", ".join(["yours", *calls[-MOST_CALLS:], *more])
    kernels = f"Kernels that share memory with it may wait for ever: {whose}."
    if ABORTS:
        return (
            f"{kernels} This process ends in {GRACE_S:g} s, unless it closes that memory; {VARIABLE}=report keeps it."
        )
    return f"{kernels} This process goes on, as {VARIABLE}=report says."
