"""What a process with a GPU does when one of its peers has ended.

Kernels may wait for that one for ever, and the host for them in a call that no signal interrupts. So a thread says at
once what is known, and ends the process with `PeerLostError` after a grace if it is still so. ``IRIS_PEER_LOST`` (read
when Iris is imported): ``abort``, or ``report`` for programs that see to it themselves. Meetings on the host, and
kernels in the simulator, raise the error by themselves.
"""

import atexit
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch

from iris import mode
from iris.errors import InvalidSettingError, PeerLostError, names
from iris.heap.mapping import Mapping, mappings
from iris.world import farewell, peers
from iris.world.peers import Peer

VARIABLE = "IRIS_PEER_LOST"
GRACE_S = 10.0
# For telling the other ranks why this one ends, which may not return.
TELLING_S = 0.5
# How many of the library's calls are listed at most: those that were used last.
MOST_CALLS = 3
# How often to look whether kernels wait for a rank whose program has ended well.
INTERVAL_S = 1.0

_LIBRARIES = (str(Path(__file__).parent) + os.sep, str(Path(torch.__file__).parent) + os.sep)

# The devices whose memory is shared with a rank that has ended. The lock is held while a thread waits for them.
_devices: set[torch.device] = set()
_draining = threading.Lock()


def _aborts() -> bool:
    choice = os.environ.get(VARIABLE) or "abort"
    if choice not in ("abort", "report"):
        raise InvalidSettingError(VARIABLE, choice, f"abort (after {GRACE_S:g} s) or report")
    return choice == "abort"


ABORTS: bool = _aborts()


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
        _say(f"{_report()} {_outlook()}")
        time.sleep(GRACE_S)
        ends = bool(_touched() or _steps(peer)) or not _is_done(_drain, GRACE_S)
    else:
        # It may have nothing to do any more: what matters is whether a kernel waits for it.
        while not (ends := not _is_done(_drain, GRACE_S)) and _touched():
            time.sleep(INTERVAL_S)
        if ends:
            _say(f"{_report()} The GPU has been at work for {GRACE_S:g} s since, or waits.")
    if ends and ABORTS:
        _abort()


def _is_done(work: Callable[[], None], limit_s: float) -> bool:
    """Whether it is done within the limit, in another thread: nothing ends a call that waits for a hung kernel."""
    thread = threading.Thread(target=work, name="iris-peer-loss", daemon=True)
    thread.start()
    thread.join(limit_s)
    return not thread.is_alive()


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
    where = f"{names(own).capitalize() if own else 'This rank'} is {_place()}."
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


def _place() -> str:
    """The main thread's line in the user's program, and what it has called there."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    inner = frame
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES) and frame.f_back is not None:
        frame = frame.f_back
    if frame is None:
        return "in its end"
    called = "" if inner is None or inner is frame else f", in {_name(inner)}"
    return f"at {frame.f_code.co_filename}:{frame.f_lineno} in {_name(frame)}{called}"


def _name(frame: FrameType) -> str:
    return f"{frame.f_code.co_name}()"


def _abort() -> None:
    error = f"{_report()} After {GRACE_S:g} s this rank ends ({VARIABLE}=abort)."
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
    _say(f"The main thread is here:\n{stack}iris.errors.{PeerLostError.__name__}: {error}")
    _is_done(lambda: farewell.leave(f"{PeerLostError.__name__}: {error}"), TELLING_S)
    _is_done(sys.stdout.flush, TELLING_S)
    os._exit(1)


def _say(text: str) -> None:
    # Not through sys.stderr, whose lock the main thread may hold.
    os.write(2, f"[Iris] {text}\n".encode())
